"""What each ticket has been used for: by which peers, for how many bytes, and whether it still may be.

A peer is bound to a ticket at its first use, for good: who leaves does not make room for another, not even over a
restart of the authority. So the record of a ticket is durable before the grant that it led to. How much its peers
fetched (`quota`) is written down now and then: a crash forgets a hundredth of the quota at most.

A person may revoke a ticket, or bar one peer, whatever tickets it has; and take either back.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec

from codec.unpack import unpack
from swarm.protocol.documents import AuthorityTime, Capability

__all__ = ["BARRED", "REVOKED", "Ticket", "Tickets"]

Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0)]

_MOST_FETCHED: Final = (1 << 63) - 1
"""What a record can hold."""

REVOKED: Final = "This ticket has been revoked: ask for a new one (swarm-node invite)."
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


_decoder = msgspec.msgpack.Decoder(_Record)
_bar_decoder = msgspec.msgpack.Decoder(Key32)


@dataclass(slots=True)
class Ticket:
    """One ticket that somebody has used, or that was revoked."""

    id: bytes
    expires: float = 0.0
    """Authority time; 0: nobody has shown it since it is known to us."""
    nodes: int = 0
    quota_bytes: int = 0
    """0: no limit."""
    peers: set[bytes] = field(default_factory=set)
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

    def __iter__(self) -> Iterator[Ticket]:
        """In the order of their ids."""
        return iter([ticket for _, ticket in sorted(self._tickets.items())])

    def get(self, id_: bytes) -> Ticket | None:
        return self._tickets.get(id_)

    def refusal(self, capability: Capability, peer: bytes, now: AuthorityTime) -> str | None:
        """One sentence why this peer may not come in by it; None when it may."""
        if peer in self._barred:
            return BARRED
        ticket = self._of(capability.id)
        ticket.expires, ticket.nodes, ticket.quota_bytes = capability.expires, capability.nodes, capability.quota_bytes
        if ticket.revoked:
            return REVOKED
        if now >= capability.expires:
            return "This ticket has expired: ask for a new one (swarm-node invite)."
        if ticket.used_up:
            return ticket.no_more
        if peer not in ticket.peers and len(ticket.peers) >= capability.nodes:
            return f"All {capability.nodes} places of this ticket are taken: ask for a new one (swarm-node invite)."
        return None

    def bind(self, id_: bytes, peer: bytes) -> bool:
        """`peer` comes in by it; True when that is its first time, which is to be made durable."""
        ticket = self._of(id_)
        if peer in ticket.peers:
            return False
        ticket.peers.add(peer)
        return True

    def revoke(self, id_: bytes, *, undo: bool = False) -> bool:
        """Nobody comes in by it any more (`undo`: again); True when that is new, and to be made durable."""
        ticket = self._of(id_)
        changed = ticket.revoked == undo
        ticket.revoked = not undo
        return changed

    def bar(self, peer: bytes, *, undo: bool = False) -> bool:
        """This peer does not come in by any ticket any more (`undo`: again); True when that is new."""
        changed = (peer in self._barred) == undo
        (self._barred.discard if undo else self._barred.add)(peer)
        return changed

    @property
    def barred(self) -> list[bytes]:
        """In a fixed order."""
        return sorted(self._barred)

    def users(self, id_: bytes) -> list[bytes]:
        """Whoever came in by it, in a fixed order."""
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
                id_, ticket.revoked, tuple(self.users(id_)), ticket.fetched_bytes, ticket.expires, ticket.nodes,
                ticket.quota_bytes,
            )
        )  # fmt: skip

    def bar_record(self, peer: bytes) -> bytes:
        """What is persisted under `bar/PEER`; empty: it may come in."""
        return msgspec.msgpack.encode(peer) if peer in self._barred else b""

    def restore(self, records: Iterable[bytes], bars: Iterable[bytes] = ()) -> None:
        """`PeerError` when a record is not one of ours. `bars`: those of peers."""
        for data in records:
            self._restore(unpack(_decoder, data, "ticket record"))
        for data in bars:
            self._barred.add(unpack(_bar_decoder, data, "ticket record"))

    def _restore(self, record: _Record) -> None:
        ticket = self._of(record.id)
        ticket.peers |= set(record.peers)
        ticket.revoked = ticket.revoked or record.revoked
        ticket.fetched_bytes = ticket.written_bytes = record.fetched_bytes
        ticket.expires, ticket.nodes, ticket.quota_bytes = record.expires, record.nodes, record.quota_bytes

    def _of(self, id_: bytes) -> Ticket:
        return self._tickets.setdefault(id_, Ticket(id_))
