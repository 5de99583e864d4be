"""What the authority knows of a member beside its lease: how it asked to join, where it was seen and can be dialed.

It is made durable together with the grant, for without it a restarted authority would know of its members neither
addresses nor uplinks, and would have to feed them all itself.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from swarm.protocol.core.events import Probe, Probed
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.reach import is_circuit, is_name, scope
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Join, decode, encode
from swarm.protocol.membership.roster import Member

__all__ = ["Enrolment", "Enrolments", "observed_addresses", "open_record", "record_of"]


def observed_addresses(addrs: tuple[str, ...], seen_at: str | None) -> tuple[str, ...]:
    """Addresses as the world may dial them: a wildcard (`/ip4/0.0.0.0/...`) gets the host that we see the peer at."""
    seen = seen_at is not None and seen_at.startswith(("/ip4/", "/ip6/")) and not is_circuit(seen_at)
    host = seen_at.split("/")[2] if seen and seen_at is not None else None
    made: list[str] = []
    for addr in addrs:
        parts = addr.split("/")
        if len(parts) > 2 and parts[2] in ("0.0.0.0", "::"):
            if host is None:
                continue
            parts[1], parts[2] = "ip6" if ":" in host else "ip4", host
        made.append("/".join(parts))
    return tuple(dict.fromkeys(made))


MAX_PROBES: Final = 4
"""Addresses of one member that are dialed back: as many as a ticket names of the seed."""

PROBE_AGAIN_S: Final = 600.0
"""Boxes move and port mappings end."""


@dataclass(slots=True)
class Enrolment:
    """One member's."""

    join: Join
    seen_at: str | None
    """Where the transport saw it when it last came."""
    held_once: bool = False
    """It has held a version."""
    newest: VersionId | None = None
    """The newest version that it said it holds, since it joined or the authority started."""
    proven: bool = False
    """Others had verified bytes from it: it may stand inside a tree."""
    dialed: tuple[str, ...] = ()
    """Where it answered when it was last dialed back."""
    probed_at: float = float("-inf")
    """Local time at which that was last begun."""
    saving: bool = False
    """It says that it may send little more today: it gives nothing."""

    def claims(self) -> tuple[str, ...]:
        """The direct addresses that it may have: to be dialed back, nothing to rely on.

        Of one that comes from the world no private ones: they are of another network than ours. And never a name, which
        could lead to any host of ours: members resolve their own names before they say where they are.
        """
        seen, addrs = scope(self.seen_at), observed_addresses(self.join.addrs, self.seen_at)
        return tuple(a for a in addrs if not is_circuit(a) and not is_name(a) and scope(a) >= seen)[:MAX_PROBES]

    def member(self, slot: int, peer: bytes, *, leaf: bool) -> Member:
        """What others are told. Its circuits stand as it named them, unless others would be led into networks of their
        own: by a name, or by an address that is nearer than the member is seen."""
        join, seen = self.join, scope(self.seen_at)
        circuits = tuple(a for a in join.addrs if is_circuit(a) and not is_name(a) and scope(a) >= seen)
        return Member(
            slot, peer, self.dialed + circuits[:MAX_PROBES], bool(self.dialed), join.name, join.region, join.up_mbit,
            leaf, scope(self.seen_at),
        )  # fmt: skip


class Enrolments(dict[bytes, Enrolment]):
    """By peer. Each is dialed back when it comes, and now and then: until it answers, nobody hears of its addresses."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def probe(self, peer: bytes, now: float) -> None:
        """Dial it back at what it calls its addresses."""
        enrolment = self[peer]
        enrolment.probed_at = now
        if claims := enrolment.claims():
            self._outbox.emit(Probe(peer, claims))

    def probed(self, event: Probed) -> bool:
        """Where it answered; True when that is news."""
        enrolment = self.get(event.peer)
        if enrolment is None or enrolment.dialed == event.addrs:
            return False
        enrolment.dialed = event.addrs
        return True

    def probe_due(self, now: float) -> None:
        """The one that has waited longest, if it is time: one a call, for each costs a handshake."""
        due = [(each.probed_at, peer) for peer, each in self.items() if now - each.probed_at >= PROBE_AGAIN_S]
        if due:
            self.probe(min(due)[1], now)


_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, str | None, tuple[str, ...], bool])


def record_of(sealed_grant: bytes, enrolment: Enrolment) -> bytes:
    """What is persisted under `grant/SLOT`; an empty record stands for a released slot."""
    return msgspec.msgpack.encode(
        (sealed_grant, encode(enrolment.join), enrolment.seen_at, enrolment.dialed, enrolment.proven)
    )


def open_record(record: bytes) -> tuple[bytes, Enrolment]:
    """(sealed grant, enrolment). `PeerError` when the record is not one of ours."""
    sealed, join, seen_at, dialed, proven = unpack(_decoder, record, "grant record")
    message = decode(join)
    if not isinstance(message, Join):
        raise PeerError("grant record: holds no join")
    return sealed, Enrolment(message, seen_at, dialed=dialed, held_once=proven, proven=proven)
