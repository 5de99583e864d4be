"""What each ticket has been used for: by which peers, for how many bytes, and whether it still may be.

A ticket has places: so many peers at a time. A peer takes one with its lease and gives it back with that, however the
lease ends; so a box that is lost makes room for another once its lease is over. A ticket may also say how many
different peers it is for in all (`nodes_ever`). Because leaving makes room, how many places are taken a minute is
bounded too: two Sybils that take turns would cost the trainer a plan and a record each.

So the record of a ticket is durable before the grant that it led to. How much its peers fetched (`quota`) is written
down now and then: a crash forgets a hundredth of the quota at most.

A person may revoke a ticket, or bar one peer, whatever tickets it has; and take either back. A peer that was kicked is
barred for a while, over restarts of the authority too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec

from codec.unpack import unpack
from swarm.protocol.core.bucket import Bucket
from swarm.protocol.core.documents import AuthorityTime, Capability

__all__ = ["BARRED", "LATER", "REVOKED", "Refusal", "Ticket", "Tickets"]

Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0)]

_MOST_FETCHED: Final = (1 << 63) - 1
"""What a record can hold."""

REVOKED: Final = "This ticket has been revoked: ask for a new one (swarm-node invite)."
TICKET: Final = "ticket"
"""Code of a refusal that the same ticket will meet again: whoever shows it gives up."""
LATER: Final = "later"
"""Code of one that time mends: it asks again."""
REMEMBERED: Final = 256
"""Peers whose use of a ticket is remembered for people to see, where it does not say for how many it is: 8 KiB."""
REFILL_S: Final = 60.0
"""A ticket's places can all be taken anew in this time: as fast as a fleet of spot machines is replaced."""
TURNS_MORE: Final = 4
"""Beyond that, a machine may be started again so often while somebody sets it up."""
BARRED: Final = "The trainer has put this machine out: ask whoever runs it."


class _Record(NamedTuple):
    """`ticket/ID`. What came later than the first release has a default."""

    id: Id
    revoked: bool
    peers: tuple[Key32, ...]
    fetched_bytes: Count = 0
    expires: float = 0.0
    nodes: Count = 0
    quota_bytes: Count = 0
    nodes_ever: Count = 0
    ever: Count = 0


class _Kick(NamedTuple):
    """`kick/PEER`."""

    peer: Key32
    until: float


class Refusal(NamedTuple):
    """Why a peer may not come in by a ticket."""

    code: str
    """`TICKET` or `LATER`."""
    why: str
    """One sentence, for people."""


_decoder = msgspec.msgpack.Decoder(_Record)
_bar_decoder = msgspec.msgpack.Decoder(Key32 | _Kick)


@dataclass(slots=True)
class Ticket:
    """One ticket that somebody has used, or that was revoked."""

    id: bytes
    expires: float = 0.0
    """Authority time; 0: nobody has shown it since it is known to us."""
    nodes: int = 0
    """How many peers at a time."""
    nodes_ever: int = 0
    """How many different ones ever; 0: no limit."""
    quota_bytes: int = 0
    """0: no limit."""
    here: set[bytes] = field(default_factory=set)
    """Who has a lease by it now."""
    peers: dict[bytes, None] = field(default_factory=dict)
    """Who came in by it, the latest last: all where there is a limit, else the last `REMEMBERED`."""
    ever: int = 0
    """How many different peers came in by it. Without a limit one that came back after so many others counts twice."""
    turns: Bucket | None = None
    """Places that may be taken now; anew with each boot of the authority."""
    revoked: bool = False
    fetched_bytes: int = 0
    written_bytes: int = 0
    """`fetched_bytes` as it was last made durable."""

    @property
    def used_up(self) -> bool:
        return 0 < self.quota_bytes <= self.fetched_bytes

    @property
    def no_more(self) -> str:
        """One sentence, for whoever wants more than the quota."""
        return (
            f"The {self.quota_bytes / 1e9:.3g} GB that machines may fetch by this ticket are used up: "
            "ask for a new one (swarm-node invite --quota-gb)."
        )


class Tickets:
    """By the id of their capability."""

    def __init__(self) -> None:
        self._tickets: dict[bytes, Ticket] = {}
        self._barred: set[bytes] = set()
        self._kicked: dict[bytes, float] = {}
        """Until when (authority time) it may not come in."""

    def __iter__(self) -> Iterator[Ticket]:
        """In the order of their ids."""
        return iter([ticket for _, ticket in sorted(self._tickets.items())])

    def get(self, id_: bytes) -> Ticket | None:
        return self._tickets.get(id_)

    def refusal(self, capability: Capability, peer: bytes, now: AuthorityTime) -> Refusal | None:
        """Why this peer may not come in by it; None when it may, which is counted."""
        if peer in self._barred or self._kicked.get(peer, 0.0) > now:
            return Refusal(TICKET, BARRED)
        ticket = self._of(capability.id)
        ticket.expires, ticket.nodes, ticket.quota_bytes = capability.expires, capability.nodes, capability.quota_bytes
        ticket.nodes_ever = capability.nodes_ever
        if ticket.revoked:
            return Refusal(TICKET, REVOKED)
        if now >= capability.expires:
            return Refusal(TICKET, "This ticket has expired: ask for a new one (swarm-node invite).")
        if ticket.used_up:
            return Refusal(TICKET, ticket.no_more)
        if peer in ticket.here:
            return None
        if len(ticket.here) >= capability.nodes:
            return Refusal(TICKET, (
                f"All {capability.nodes} places of this ticket are taken: one is free again when a machine's lease is "
                "over. For more machines at a time ask for another ticket (swarm-node invite --nodes)."
            ))  # fmt: skip
        if peer not in ticket.peers and 0 < capability.nodes_ever <= ticket.ever:
            return Refusal(TICKET, (
                f"{ticket.ever} different machines have come in by this ticket, as many as it is for: "
                "ask for a new one (swarm-node invite)."
            ))  # fmt: skip
        if ticket.turns is None:
            turns = capability.nodes + TURNS_MORE
            ticket.turns = Bucket(turns / REFILL_S, turns)
        if not ticket.turns.take(1.0, now):
            return Refusal(LATER, "More machines come by this ticket than it has places a minute: this one waits.")
        return None

    def bind(self, id_: bytes, peer: bytes) -> None:
        """`peer` has a lease by it, which is to be made durable after the ticket's record."""
        ticket = self._of(id_)
        ticket.here.add(peer)
        if peer in ticket.peers:
            del ticket.peers[peer]
        else:
            ticket.ever += 1
        ticket.peers[peer] = None
        while len(ticket.peers) > max(REMEMBERED, ticket.nodes_ever):
            del ticket.peers[next(iter(ticket.peers))]

    def reserve(self, capability: Capability, peers: Iterable[bytes]) -> None:
        """This ticket is for these peers, and for no others: they count as having come in by it before.

        `capability.nodes_ever` must be their number, and at least 1.
        """
        ticket = self._of(capability.id)
        ticket.expires, ticket.nodes, ticket.quota_bytes = capability.expires, capability.nodes, capability.quota_bytes
        ticket.peers, ticket.nodes_ever = dict.fromkeys(sorted(peers)), capability.nodes_ever
        ticket.ever = ticket.nodes_ever

    def resume(self, id_: bytes, peer: bytes) -> None:
        """`peer` has had a lease by it since an earlier boot: counted then, though perhaps not remembered."""
        ticket = self._of(id_)
        ticket.here.add(peer)
        ticket.peers.setdefault(peer)
        ticket.ever = max(ticket.ever, len(ticket.peers))

    def left(self, id_: bytes, peer: bytes) -> None:
        """Its lease by this ticket is over: its place is free."""
        self._of(id_).here.discard(peer)

    def revoke(self, id_: bytes, *, undo: bool = False) -> bool:
        """Nobody comes in by it any more (`undo`: again); True when that is new, and to be made durable."""
        ticket = self._of(id_)
        changed = ticket.revoked == undo
        ticket.revoked = not undo
        return changed

    def bar(self, peer: bytes, *, undo: bool = False) -> bool:
        """This peer does not come in by any ticket any more (`undo`: again); True when that is new."""
        changed = (peer in self._barred) == undo
        if undo:
            self._kicked.pop(peer, None)
        (self._barred.discard if undo else self._barred.add)(peer)
        return changed

    def kick(self, peer: bytes, until: AuthorityTime) -> None:
        """This peer does not come in by any ticket before then; to be made durable."""
        self._kicked[peer] = until

    def forgive(self, now: AuthorityTime) -> list[bytes]:
        """Forget kicks that are over; whose, for their records are of no use any more."""
        over = sorted(peer for peer, until in self._kicked.items() if until <= now)
        for peer in over:
            del self._kicked[peer]
        return over

    @property
    def barred(self) -> list[bytes]:
        """In a fixed order."""
        return sorted(self._barred)

    def users(self, id_: bytes) -> list[bytes]:
        """Whoever is known to have come in by it, in a fixed order."""
        return sorted(self._of(id_).peers) if id_ in self._tickets else []

    def fetched(self, id_: bytes, more_bytes: int) -> bool:
        """Its peers fetched so much more; True when that is to be made durable."""
        ticket = self._of(id_)
        ticket.fetched_bytes = min(_MOST_FETCHED, ticket.fetched_bytes + more_bytes)
        if ticket.quota_bytes == 0 or ticket.fetched_bytes - ticket.written_bytes < ticket.quota_bytes // 100:
            return False
        ticket.written_bytes = ticket.fetched_bytes
        return True

    # ------------------------------------------------------------ on disk

    def record(self, id_: bytes) -> bytes:
        """What is persisted under `ticket/ID`."""
        ticket = self._of(id_)
        ticket.written_bytes = ticket.fetched_bytes
        return msgspec.msgpack.encode(
            _Record(
                id_, ticket.revoked, tuple(ticket.peers), ticket.fetched_bytes, ticket.expires, ticket.nodes,
                ticket.quota_bytes, ticket.nodes_ever, ticket.ever,
            )
        )  # fmt: skip

    def bar_record(self, peer: bytes) -> bytes:
        """What is persisted under `bar/PEER`; empty: it may come in."""
        return msgspec.msgpack.encode(peer) if peer in self._barred else b""

    def kick_record(self, peer: bytes) -> bytes:
        """What is persisted under `kick/PEER`; empty: it may come in."""
        until = self._kicked.get(peer)
        return b"" if until is None else msgspec.msgpack.encode(_Kick(peer, until))

    def restore(self, records: Iterable[bytes], bars: Iterable[bytes] = ()) -> None:
        """`PeerError` when a record is not one of ours. `bars`: those of peers, kicks among them."""
        for data in records:
            self._restore(unpack(_decoder, data, "ticket record"))
        for data in bars:
            match unpack(_bar_decoder, data, "ticket record"):
                case _Kick(peer, until):
                    self._kicked[peer] = until
                case peer:
                    self._barred.add(peer)

    def _restore(self, record: _Record) -> None:
        ticket = self._of(record.id)
        ticket.peers |= dict.fromkeys(record.peers[-max(REMEMBERED, record.nodes_ever) :])
        ticket.ever = max(record.ever, len(record.peers))
        ticket.nodes_ever = record.nodes_ever
        ticket.revoked = ticket.revoked or record.revoked
        ticket.fetched_bytes = ticket.written_bytes = record.fetched_bytes
        ticket.expires, ticket.nodes, ticket.quota_bytes = record.expires, record.nodes, record.quota_bytes

    def _of(self, id_: bytes) -> Ticket:
        return self._tickets.setdefault(id_, Ticket(id_))
