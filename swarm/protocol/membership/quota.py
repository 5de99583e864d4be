"""How many bytes each peer fetched while catching up, for the quota of its ticket.

There are three sources: the peer's own reports, the authority's count of what it gave, and the reports of other givers.
A peer may report too little, and a giver too much. So the larger of two sums counts: the peer's own, and that of the
authority and the givers without the side that reports most. A side is one giver of the peer's own ticket, or all givers
of another ticket. So the machines of another ticket, however many, cannot charge a peer; and a peer that hides what it
fetched from several givers is still charged.

Every total counts from the grant under which it is reported, so a lost report loses no bytes.

Of givers whose leases have ended only sums are kept, so a peer that outlives many neighbours needs no more memory.
"""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["MOST_BYTES", "Fetched"]

MOST_BYTES = 1 << 50
"""Upper bound of every total: 1 PiB. No machine fetches more under one grant, so larger numbers are false."""


@dataclass(slots=True)
class _Total:
    """The bytes counted from a total that is reported repeatedly, and that restarts at zero with each new grant."""

    last: int = 0
    counted: int = 0

    def hear(self, total: int) -> None:
        total = min(total, MOST_BYTES)
        self.counted = min(MOST_BYTES, self.counted + (total - self.last if total >= self.last else total))
        self.last = total


@dataclass(slots=True)
class _Said(_Total):
    """The totals that one giver reports."""

    side: bytes = b""
    """Givers of one side may conspire, so they are left out together."""


@dataclass(slots=True)
class _Peer:
    """The reports about one peer."""

    own: _Total = field(default_factory=_Total)
    ours: int = 0
    """Bytes that the authority gave it."""
    said: dict[bytes, _Said] = field(default_factory=dict)
    """What givers report, by giver."""
    past: dict[bytes, int] = field(default_factory=dict)
    """Bytes that givers reported whose leases have ended, by side: of other tickets, and of `most`."""
    most: bytes = b""
    """The one of these givers that reported most among those of the peer's own ticket; empty: there is none."""
    past_bytes: int = 0
    """Bytes that the others of these givers reported. They were never the side that reports most, so they count."""
    charged: int = 0
    """Bytes charged to the ticket so far."""

    @property
    def fetched_bytes(self) -> int:
        """The bytes that count; see the top of this file."""
        sides = Counter(self.past)
        for total in self.said.values():
            sides[total.side] += total.counted
        given = self.ours + self.past_bytes + sides.total() - max(sides.values(), default=0)
        return min(MOST_BYTES, max(self.own.counted, given))

    def end(self, giver: bytes) -> None:
        """The lease of this giver has ended: what it reported still counts; its next report is of another grant."""
        total = self.said.pop(giver, None)
        if total is None:
            return
        self.past[total.side] = self.past.get(total.side, 0) + total.counted
        if total.side == giver != self.most:
            less, self.most = sorted((self.most, giver), key=lambda side: self.past.get(side, 0))
            self.past_bytes += self.past.pop(less, 0)


class Fetched:
    """The bytes fetched by each peer that has a lease."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Peer] = {}
        self._resumed: set[tuple[bytes, bytes]] = set()
        """(reporter, peer) of totals from before the authority's start, of which the first heard is the baseline."""
        self._before: set[bytes] = set()

    def resume(self, peer: bytes) -> None:
        """The peer has a lease of an earlier boot: what it reported then has been counted."""
        self._before.add(peer)

    def own(self, peer: bytes, total: int) -> int:
        """The peer reports that it fetched `total` bytes; the bytes to charge to its ticket now."""
        self._hear(self._of(peer).own, peer, peer, total)
        return self._charge(peer)

    def said(self, giver: bytes, peer: bytes, total: int, side: bytes = b"") -> int:
        """A giver reports that it gave the peer `total` bytes; the bytes to charge now.

        `side`: the giver's ticket, if it is not the peer's.
        """
        if giver == peer:
            return 0
        said = self._of(peer).said.setdefault(giver, _Said())
        said.side = side or giver
        self._hear(said, giver, peer, total)
        return self._charge(peer)

    def gave(self, peer: bytes, more: int) -> int:
        """The authority gave the peer `more` bytes; the bytes to charge now."""
        self._of(peer).ours += more
        return self._charge(peer)

    def forget(self, peer: bytes) -> None:
        """The peer's lease has ended."""
        self._peers.pop(peer, None)
        self._before.discard(peer)
        self._resumed = {pair for pair in self._resumed if peer not in pair}
        for other in self._peers.values():
            other.end(peer)

    def _hear(self, total: _Total, reporter: bytes, peer: bytes, number: int) -> None:
        if reporter in self._before and (reporter, peer) not in self._resumed:
            self._resumed.add((reporter, peer))
            total.last = min(number, MOST_BYTES)
        else:
            total.hear(number)

    def _charge(self, peer: bytes) -> int:
        reports = self._of(peer)
        more = max(0, reports.fetched_bytes - reports.charged)
        reports.charged += more
        return more

    def _of(self, peer: bytes) -> _Peer:
        return self._peers.setdefault(peer, _Peer())
