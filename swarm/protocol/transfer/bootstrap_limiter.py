"""The bootstrap limiter: the trainer gives blocks of the model to few members at a time, while no other has them.

If many members join an empty swarm at once, each would fetch a copy from the trainer, and none would be complete before
all are. So the trainer serves a few at a time. The others ask again later; once a member is complete, they fetch from
it.
"""

__all__ = ["BootstrapLimiter"]


class BootstrapLimiter:
    """Admits `most` members at a time; one that asks for nothing for `patience_s` seconds loses its place."""

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._asked_at: dict[bytes, float] = {}

    def admits(self, peer: bytes, now: float) -> bool:
        """Whether to give `peer` blocks now. `now`: local time in seconds."""
        if peer not in self._asked_at:
            self._asked_at = {p: at for p, at in self._asked_at.items() if now - at <= self._patience_s}
            if len(self._asked_at) >= self._most:
                return False
        self._asked_at[peer] = now
        return True

    def done(self, peer: bytes) -> None:
        """`peer` is complete or has left: free its place."""
        self._asked_at.pop(peer, None)
