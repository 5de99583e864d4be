"""Whether a process is ready for work, for load balancers and for Kubernetes' readiness probes.

Being alive is another question: a process that answers is alive, also during a pause or a catch-up. A node falls behind
the head at each version for as long as the version travels, so it stays ready for `BEHIND_S` after it held the head.
"""

from typing import Final

from msgspec import UNSET

from node.status.schema import SeedStatus, Status

__all__ = ["BEHIND_S", "Readiness"]

BEHIND_S: Final = 60.0
"""A version that takes longer than this is no usual step: the node is behind, and others should get its work."""


class Readiness:
    """Remembers when the process last held the head."""

    def __init__(self) -> None:
        self._held_head_at = float("-inf")

    def why_not(self, status: Status, now: float) -> str:
        """Why the process is not ready, as a sentence; empty: it is. `now`: local time, s."""
        if isinstance(status, SeedStatus):
            return "" if status.head is not None else "No version is sealed yet."
        own = status.nodes[0] if status.nodes else None
        if own is None or own.slot < 0:
            return "The swarm has not admitted this machine yet."
        if own.standing != "fresh":
            return f"The lease is {own.standing or 'not known'}: the seed has not answered lately."
        if own.held is None:
            return f"The model is not here yet ({own.catching_up:.0%})."
        if status.head is None or own.held >= status.head:
            self._held_head_at = now
        elif now - self._held_head_at > BEHIND_S:
            return f"It holds version {own.held[1]}, and the newest is {status.head[1]}."
        if own.engine is UNSET:
            return ""
        if own.engine is None:
            return "The engines are asleep." if own.asleep is True else "The engine is not ready."
        if own.live_proven is False:
            return "The engine's weights are not those of its version."
        return ""
