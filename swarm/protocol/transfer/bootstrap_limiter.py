"""Whom the trainer gives blocks of the model, where no member has it: few at a time.

A crowd that joins an empty swarm would cost it a copy each, and nobody would be whole before all are. So a few are fed,
one after the other; the rest ask again, and as soon as somebody is whole they are sent to that one.
"""

__all__ = ["BootstrapLimiter"]


class BootstrapLimiter:
    """`most` at a time; one that asks for nothing for `patience_s` makes room. Times in s, local."""

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self._asked_at: dict[bytes, float] = {}

    def admits(self, peer: bytes, now: float) -> bool:
        """Whether it is its turn."""
        if peer not in self._asked_at:
            self._asked_at = {p: at for p, at in self._asked_at.items() if now - at <= self._patience_s}
            if len(self._asked_at) >= self._most:
                return False
        self._asked_at[peer] = now
        return True

    def done(self, peer: bytes) -> None:
        """It is whole, or gone."""
        self._asked_at.pop(peer, None)
