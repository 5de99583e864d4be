"""How much each peer fetched while catching up, for the quota of its ticket.

Three say so: the peer itself, the authority of what it gave, and the givers of what they gave. A peer may say too
little, and a giver too much. So what counts is the most of what it says itself and of what the others say, where
whoever says most is left out: one giver of the peer's own ticket, or all givers of another ticket. However many
machines another ticket brought in, they can charge nobody; and a peer that hides what it fetched from several is found
out.

All totals are those since the grant under which they are said, so none is lost with a report.
"""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["MOST_BYTES", "Fetched"]

MOST_BYTES = 1 << 50
"""A petabyte: no machine fetches more under one grant. What is said beyond it is no number to reckon with."""


@dataclass(slots=True)
class _Total:
    """What was counted of a total that somebody repeats, and that begins anew with each of its grants."""

    last: int = 0
    counted: int = 0

    def hear(self, total: int) -> None:
        total = min(total, MOST_BYTES)
        self.counted = min(MOST_BYTES, self.counted + (total - self.last if total >= self.last else total))
        self.last = total


@dataclass(slots=True)
class _Peer:
    own: _Total = field(default_factory=_Total)
    ours: int = 0
    """What the authority gave it."""
    said: dict[bytes, _Total] = field(default_factory=dict)
    """By giver."""
    sides: dict[bytes, bytes] = field(default_factory=dict)
    """By giver, whom it may conspire with: others of the same side are left out together with it."""
    told: int = 0
    """What the ticket has been charged."""

    @property
    def fetched_bytes(self) -> int:
        said: Counter[bytes] = Counter()
        for giver, total in self.said.items():
            said[self.sides[giver]] += total.counted
        return min(MOST_BYTES, max(self.own.counted, self.ours + said.total() - max(said.values(), default=0)))


class Fetched:
    """By peer, of those that have a lease."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Peer] = {}
        self._resumed: set[tuple[bytes, bytes]] = set()
        """(who says it, of whom): heard of before our start, so that the first total is where we begin to count."""
        self._before: set[bytes] = set()

    def resume(self, peer: bytes) -> None:
        """It has a lease of an earlier boot: what it says of earlier times has been counted."""
        self._before.add(peer)

    def own(self, peer: bytes, total: int) -> int:
        """It says that it fetched so much; by how much the charge on its ticket rises."""
        self._hear(self._of(peer).own, peer, peer, total)
        return self._charge(peer)

    def said(self, giver: bytes, peer: bytes, total: int, side: bytes = b"") -> int:
        """Another member says that it gave it so much. `side`: its ticket, if that is another than the peer's."""
        if giver == peer:
            return 0
        self._of(peer).sides[giver] = side or giver
        self._hear(self._of(peer).said.setdefault(giver, _Total()), giver, peer, total)
        return self._charge(peer)

    def gave(self, peer: bytes, more: int) -> int:
        """We gave it so much more ourselves."""
        self._of(peer).ours += more
        return self._charge(peer)

    def forget(self, peer: bytes) -> None:
        """Its lease has ended."""
        self._peers.pop(peer, None)
        self._before.discard(peer)
        self._resumed = {pair for pair in self._resumed if peer not in pair}
        for each in self._peers.values():
            if peer in each.said:  # what it said stands; said anew, it is of another grant
                each.said[peer].last = 0

    def _hear(self, total: _Total, sayer: bytes, peer: bytes, number: int) -> None:
        if sayer in self._before and (sayer, peer) not in self._resumed:
            self._resumed.add((sayer, peer))
            total.last = min(number, MOST_BYTES)
        else:
            total.hear(number)

    def _charge(self, peer: bytes) -> int:
        each = self._of(peer)
        more = max(0, each.fetched_bytes - each.told)
        each.told += more
        return more

    def _of(self, peer: bytes) -> _Peer:
        return self._peers.setdefault(peer, _Peer())
