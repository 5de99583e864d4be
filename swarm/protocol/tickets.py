"""What each ticket has been used for: by which peers, and whether it still may be.

A peer is bound to a ticket at its first use, for good: who leaves does not make room for another, not even over a
restart of the authority. So the record of a ticket is durable before the grant that it led to.
"""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

from codec.errors import PeerError
from swarm.protocol.documents import AuthorityTime, Capability

__all__ = ["Tickets"]

Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Record(NamedTuple):
    id: Id
    revoked: bool
    peers: tuple[Key32, ...]


_decoder = msgspec.msgpack.Decoder(_Record)


class Tickets:
    """By the id of their capability."""

    def __init__(self) -> None:
        self._used: dict[bytes, set[bytes]] = {}
        self._revoked: set[bytes] = set()

    def refusal(self, capability: Capability, peer: bytes, now: AuthorityTime) -> str | None:
        """One sentence why this peer may not come in by it; None when it may."""
        if capability.id in self._revoked:
            return "This ticket has been revoked: ask for a new one (swarm-node invite)."
        if now >= capability.expires:
            return "This ticket has expired: ask for a new one (swarm-node invite)."
        used = self._used.get(capability.id, set())
        if peer not in used and len(used) >= capability.nodes:
            return f"All {capability.nodes} places of this ticket are taken: ask for a new one (swarm-node invite)."
        return None

    def bind(self, id_: bytes, peer: bytes) -> bool:
        """`peer` comes in by it; True when that is its first time, which is to be made durable."""
        used = self._used.setdefault(id_, set())
        if peer in used:
            return False
        used.add(peer)
        return True

    def revoke(self, id_: bytes) -> None:
        """Nobody comes in by it any more."""
        self._revoked.add(id_)

    def users(self, id_: bytes) -> list[bytes]:
        """Whoever came in by it, in a fixed order."""
        return sorted(self._used.get(id_, ()))

    def record(self, id_: bytes) -> bytes:
        """What is persisted under `ticket/ID`."""
        return msgspec.msgpack.encode(_Record(id_, id_ in self._revoked, tuple(self.users(id_))))

    def restore(self, records: Iterable[bytes]) -> None:
        """`PeerError` when a record is not one of ours."""
        for data in records:
            try:
                record = _decoder.decode(data)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise PeerError(f"ticket record: {error}") from error
            self._used.setdefault(record.id, set()).update(record.peers)
            if record.revoked:
                self._revoked.add(record.id)
