"""Which conversation a prompt continues, told by its tokens: for trainers that name no session.

A turn's prompt begins with the prompt and the answer of the turn before it. So a hash of each drawn sequence is
remembered, and a prompt that begins with one of them belongs to the same session. Two sequences with one hash, which is
of 64 bits, cost a session its prefix, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

__all__ = ["PrefixSessions"]

REMEMBERED: Final = 1 << 16
"""Sequences, some 15 MB; the one that was used least recently is forgotten."""


class PrefixSessions:
    """The sessions of one process."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        """`remembered`: how many sequences, at least 1."""
        self._remembered = remembered
        self._sessions: OrderedDict[int, str] = OrderedDict()

    def find(self, prompt: Iterable[int], default: str) -> str:
        """The session of the longest remembered sequence with which `prompt` begins; without one, `default`."""
        for end in reversed(list(_ends(prompt))):
            if (session := self._sessions.get(end)) is not None:
                self._sessions.move_to_end(end)
                return session
        return default

    def note(self, tokens: Iterable[int], session: str) -> None:
        """`tokens`, a prompt with its answer, belong to `session`."""
        if not (ends := list(_ends(tokens))):
            return
        self._sessions[ends[-1]] = session
        self._sessions.move_to_end(ends[-1])
        if len(self._sessions) > self._remembered:
            self._sessions.popitem(last=False)


def _ends(tokens: Iterable[int]) -> Iterator[int]:
    """A hash of the tokens up to each token."""
    found = 0
    for token in tokens:
        found = hash((found, token))
        yield found
