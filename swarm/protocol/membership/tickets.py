"""The use of tickets: by which peers, for how many bytes, and whether each ticket is still valid.

A ticket has places, which limit the number of peers at a time. A peer takes a place with its lease and returns it when
the lease ends, in whatever way; so a lost machine makes room for another once its lease is over. A ticket may also
limit the number of different peers in total (`nodes_ever`). Since leaving makes room, the number of places taken per
minute is limited too: otherwise two Sybils that take turns would cost the trainer a plan and a record each time.

The record of a ticket is durable before the grant that it led to. The bytes that its peers fetched (`quota`) are made
durable now and then: a crash loses at most a hundredth of the quota.

The operator may revoke a ticket, or bar one peer regardless of its tickets, and undo both. A peer that was kicked is
refused for a while, also after restarts of the authority.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec

from codec.unpack import unpack
from swarm.protocol.core.bucket import Bucket
from swarm.protocol.core.documents import AuthorityTime, Capability

__all__ = ["BARRED", "LATER", "REVOKED", "Refusal", "TicketRecord", "Tickets"]

Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0)]

_MOST_FETCHED: Final = (1 << 63) - 1
"""The largest number in a record."""

REVOKED: Final = "This ticket has been revoked: ask for a new one (swarm-node invite)."
TICKET: Final = "ticket"
"""The code of a permanent refusal: the peer gives up."""
LATER: Final = "later"
"""The code of a temporary refusal: the peer asks again later."""
REMEMBERED: Final = 256
"""Peers remembered for display, for a ticket that does not limit their number: 8 KiB."""
REFILL_S: Final = 60.0
"""Seconds in which all places of a ticket can be taken again: as fast as a fleet of spot machines is replaced."""
TURNS_MORE: Final = 4
"""Additional places that may be taken at once, for a machine that is restarted during its setup."""
BARRED: Final = "The trainer has expelled this machine: ask its operator."


class _Record(NamedTuple):
    """The record `ticket/ID`. Fields that came after the first release have defaults."""

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
    """The record `kick/PEER`. `until`: authority time."""

    peer: Key32
    until: float


class Refusal(NamedTuple):
    """Why a peer is not admitted with a ticket."""

    code: str
    """`TICKET` or `LATER`."""
    why: str
    """One sentence for the user."""


_decoder = msgspec.msgpack.Decoder(_Record)
_bar_decoder = msgspec.msgpack.Decoder(Key32 | _Kick)


@dataclass(slots=True)
class TicketRecord:
    """A ticket that was used or revoked."""

    id: bytes
    expires: float = 0.0
    """Authority time; 0 if no peer has shown the ticket yet."""
    nodes: int = 0
    """The number of peers at a time."""
    nodes_ever: int = 0
    """The number of different peers in total; 0: no limit."""
    quota_bytes: int = 0
    """Bytes that its peers may fetch in catch-ups; 0: no limit."""
    here: set[bytes] = field(default_factory=set)
    """The peers that have a lease with it now."""
    peers: dict[bytes, None] = field(default_factory=dict)
    """The peers admitted with it, the latest last: all if their number is limited, otherwise the last `REMEMBERED`."""
    ever: int = 0
    """The number of different peers admitted. Without a limit, a peer that was forgotten since counts twice."""
    turns: Bucket | None = None
    """Places that may be taken now; full again after each start of the authority."""
    revoked: bool = False
    fetched_bytes: int = 0
    written_bytes: int = 0
    """The value of `fetched_bytes` that was made durable last."""

    @property
    def used_up(self) -> bool:
        """Whether the quota is used up."""
        return 0 < self.quota_bytes <= self.fetched_bytes

    @property
    def no_more(self) -> str:
        """The sentence for a peer that wants more than the quota."""
        return (
            f"The {self.quota_bytes / 1e9:.3g} GB that machines may fetch by this ticket are used up: "
            "ask for a new one (swarm-node invite --quota-gb)."
        )


class Tickets:
    """All known tickets, by the id of their capability; and the peers that are barred or kicked."""

    def __init__(self) -> None:
        self._tickets: dict[bytes, TicketRecord] = {}
        self._barred: set[bytes] = set()
        self._kicked: dict[bytes, float] = {}
        """By peer: the authority time until which it is refused."""

    def __iter__(self) -> Iterator[TicketRecord]:
        """The tickets in the order of their ids."""
        return iter([ticket for _, ticket in sorted(self._tickets.items())])

    def get(self, id_: bytes) -> TicketRecord | None:
        return self._tickets.get(id_)

    def refusal(self, capability: Capability, peer: bytes, now: AuthorityTime) -> Refusal | None:
        """Why this peer is not admitted with this ticket; None if it is, which takes a place."""
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
            return Refusal(LATER, "More machines a minute use this ticket than it has places: this one waits.")
        return None

    def bind(self, id_: bytes, peer: bytes) -> None:
        """`peer` gets a lease with this ticket. Make the ticket's record durable before the grant."""
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
        """Reserve this ticket for these peers, by counting them as admitted before.

        `capability.nodes_ever` must be their number, and at least 1.
        """
        ticket = self._of(capability.id)
        ticket.expires, ticket.nodes, ticket.quota_bytes = capability.expires, capability.nodes, capability.quota_bytes
        ticket.peers, ticket.nodes_ever = dict.fromkeys(sorted(peers)), capability.nodes_ever
        ticket.ever = ticket.nodes_ever

    def resume(self, id_: bytes, peer: bytes) -> None:
        """`peer` has a lease with this ticket since an earlier boot. It was counted then, but may not be remembered."""
        ticket = self._of(id_)
        ticket.here.add(peer)
        ticket.peers.setdefault(peer)
        ticket.ever = max(ticket.ever, len(ticket.peers))

    def left(self, id_: bytes, peer: bytes) -> None:
        """The lease of `peer` with this ticket is over: free its place."""
        self._of(id_).here.discard(peer)

    def revoke(self, id_: bytes, *, undo: bool = False) -> bool:
        """Revoke a ticket (`undo`: make it valid again); True if that changed it. The caller makes it durable."""
        ticket = self._of(id_)
        changed = ticket.revoked == undo
        ticket.revoked = not undo
        return changed

    def bar(self, peer: bytes, *, undo: bool = False) -> bool:
        """Refuse a peer with every ticket (`undo`: admit it again); True if that changed anything."""
        changed = (peer in self._barred) == undo
        if undo:
            self._kicked.pop(peer, None)
        (self._barred.discard if undo else self._barred.add)(peer)
        return changed

    def kick(self, peer: bytes, until: AuthorityTime) -> None:
        """Refuse a peer with every ticket until then. The caller makes it durable."""
        self._kicked[peer] = until

    def forgive(self, now: AuthorityTime) -> list[bytes]:
        """Forget the kicks that are over; returns their peers, so that the caller removes their records."""
        over = sorted(peer for peer, until in self._kicked.items() if until <= now)
        for peer in over:
            del self._kicked[peer]
        return over

    @property
    def barred(self) -> list[bytes]:
        """The barred peers, sorted."""
        return sorted(self._barred)

    def fetched(self, id_: bytes, more_bytes: int) -> bool:
        """Its peers fetched `more_bytes` more; True if the caller should make the record durable."""
        ticket = self._of(id_)
        ticket.fetched_bytes = min(_MOST_FETCHED, ticket.fetched_bytes + more_bytes)
        if ticket.quota_bytes == 0 or ticket.fetched_bytes - ticket.written_bytes < ticket.quota_bytes // 100:
            return False
        ticket.written_bytes = ticket.fetched_bytes
        return True

    # ------------------------------------------------------------ on disk

    def record(self, id_: bytes) -> bytes:
        """The record `ticket/ID` to persist."""
        ticket = self._of(id_)
        ticket.written_bytes = ticket.fetched_bytes
        return msgspec.msgpack.encode(
            _Record(
                id_, ticket.revoked, tuple(ticket.peers), ticket.fetched_bytes, ticket.expires, ticket.nodes,
                ticket.quota_bytes, ticket.nodes_ever, ticket.ever,
            )
        )  # fmt: skip

    def bar_record(self, peer: bytes) -> bytes:
        """The record `bar/PEER` to persist; empty if the peer is not barred."""
        return msgspec.msgpack.encode(peer) if peer in self._barred else b""

    def kick_record(self, peer: bytes) -> bytes:
        """The record `kick/PEER` to persist; empty if the peer is not kicked."""
        until = self._kicked.get(peer)
        return b"" if until is None else msgspec.msgpack.encode(_Kick(peer, until))

    def restore(self, records: Iterable[bytes], bars: Iterable[bytes] = ()) -> None:
        """Restore the records of tickets, and of barred and kicked peers (`bars`). Raises `PeerError`."""
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

    def _of(self, id_: bytes) -> TicketRecord:
        return self._tickets.setdefault(id_, TicketRecord(id_))
