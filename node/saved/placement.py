"""Decides which node is to hold which fragment of a saved state. Pure: times are arguments.

Nodes are tried in an order that follows from the swarm's key and theirs (rendezvous hashing), so every process finds
the likely holders by itself, and the next state mostly goes to the same nodes. Each fragment goes to a node of its
own, as long as there are enough; only when every other node has refused does one node get two.

    fragment: missing --next--> coming --placed--> held --(its holder left, or does not have it)--> missing
                                   '--failed, interrupted--> missing

What a node says that it holds counts only for fragments that were placed with it, or that it has proven to have by
sending a part: otherwise one that says it has all of them would keep them from the others.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from blake3 import blake3

__all__ = ["Assignment", "Placement", "order_of"]

AGAIN_S: Final = 5.0
"""Pause before a node is tried again with which something failed."""
REFUSED_S: Final = 600.0
"""Pause before a node is tried again that refused, or failed `MOST_FAILURES` times in a row."""
MOST_FAILURES: Final = 3


def order_of(swarm: bytes, peers: Iterable[tuple[bytes, bool]]) -> list[bytes]:
    """The nodes in the order in which they are tried: (peer, whether it can be dialed) each.

    Those that can be dialed come first: the machine that fetches a state has to reach its holders by itself.
    """
    return [
        peer for _, _, peer in sorted((not dialable, blake3(swarm + peer).digest(), peer) for peer, dialable in peers)
    ]


class Assignment(NamedTuple):
    """Place this fragment with this node."""

    fragment: int
    peer: bytes


@dataclass(slots=True)
class _Trouble:
    failures: int = 0
    until_s: float = 0.0
    """When the node may be tried again."""


class Placement:
    """The fragments of one saved state, and where they are."""

    def __init__(self, total: int, given: Iterable[tuple[int, bytes]] = ()) -> None:
        """`given`: as an earlier `Placement` of the same state had it."""
        self.total = total
        self.given = set(given)
        """Fragments and the nodes that they were ever placed with, or that proved to have them."""
        self.holders: dict[int, bytes] = {}
        """By fragment: the node that has it durably."""
        self._coming: dict[int, bytes] = {}
        self._trouble: dict[bytes, _Trouble] = {}
        self._peers: list[bytes] = []
        self._doubted: set[bytes] = set()
        """Nodes that did not prove what they said."""

    @property
    def is_whole(self) -> bool:
        """Whether every fragment has a holder."""
        return len(self.holders) == self.total

    @property
    def given_to(self) -> set[bytes]:
        """The nodes that fragments were ever placed with, or that proved to have some."""
        return {peer for _, peer in self.given}

    def is_stuck(self, now: float) -> bool:
        """Whether a fragment has no holder, none is on its way, and no node may be tried for now."""
        return not self.is_whole and not self._coming and all(self._is_out(peer, now) for peer in self._peers)

    def note_members(self, peers: Sequence[bytes]) -> None:
        """The nodes of the swarm now, in the order of `order_of`. What the others held counts as lost."""
        self._peers = list(peers)
        known = set(peers)
        self.holders = {fragment: peer for fragment, peer in self.holders.items() if peer in known}
        self._trouble = {peer: trouble for peer, trouble in self._trouble.items() if peer in known}
        self._doubted &= known

    def note_held(self, peer: bytes, fragments: Iterable[int]) -> None:
        """A node says which fragments it has. Of those that were placed with it the others are missing."""
        said = set(fragments)
        self.holders = {fragment: by for fragment, by in self.holders.items() if by != peer or fragment in said}
        for fragment in said:
            if (fragment, peer) in self.given:
                self.holders.setdefault(fragment, peer)

    def to_prove(self, peer: bytes, fragments: Iterable[int]) -> list[int]:
        """Of the fragments that a node says it has: those that are missing, and that it may prove to have."""
        if peer in self._doubted or peer not in self._peers:
            return []
        taken = self.holders.keys() | self._coming.keys()
        return [number for number in sorted(set(fragments)) if number < self.total and number not in taken]

    def proved(self, peer: bytes, fragment: int) -> None:
        """The node has shown that it has the fragment."""
        self.given.add((fragment, peer))
        if peer in self._peers:
            self.holders.setdefault(fragment, peer)

    def doubted(self, peer: bytes) -> None:
        """The node did not show what it said: it is asked for no proof again. It may still be given fragments."""
        self._doubted.add(peer)

    def next(self, now: float) -> Assignment | None:
        """The next fragment to send, and to whom; None while there is nothing to do or nobody to try. It is on its way
        until `placed`, `failed` or `interrupted`."""
        missing = [number for number in range(self.total) if number not in self.holders and number not in self._coming]
        if not missing:
            return None
        load = Counter((*self.holders.values(), *self._coming.values()))
        free = [peer for peer in self._peers if self._may_be_tried(peer, now)]
        if not free:
            return None
        least = min(load[peer] for peer in free)
        if least and any(load[peer] < least and not self._is_out(peer, now) for peer in self._peers):
            return None  # one that failed just now is tried again before another gets a second fragment
        assignment = Assignment(missing[0], next(peer for peer in free if load[peer] == least))
        self._coming[assignment.fragment] = assignment.peer
        return assignment

    def placed(self, assignment: Assignment) -> None:
        """The node has the fragment durably."""
        self._coming.pop(assignment.fragment, None)
        self._trouble.pop(assignment.peer, None)
        self.given.add((assignment.fragment, assignment.peer))
        if assignment.peer in self._peers:
            self.holders[assignment.fragment] = assignment.peer

    def failed(self, assignment: Assignment, now: float, *, refused: bool) -> None:
        """It did not work. `refused`: the node does not want it (no room, for example)."""
        self._coming.pop(assignment.fragment, None)
        trouble = self._trouble.setdefault(assignment.peer, _Trouble())
        trouble.failures = MOST_FAILURES if refused else trouble.failures + 1
        trouble.until_s = now + (REFUSED_S if trouble.failures >= MOST_FAILURES else AGAIN_S)

    def interrupted(self, assignment: Assignment) -> None:
        """It is not on its way any more; nothing is known against the node."""
        self._coming.pop(assignment.fragment, None)

    def _may_be_tried(self, peer: bytes, now: float) -> bool:
        trouble = self._trouble.get(peer)
        return trouble is None or now >= trouble.until_s

    def _is_out(self, peer: bytes, now: float) -> bool:
        """Whether nothing is expected of a node for now."""
        trouble = self._trouble.get(peer)
        return trouble is not None and trouble.failures >= MOST_FAILURES and now < trouble.until_s
