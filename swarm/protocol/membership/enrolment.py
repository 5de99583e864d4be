"""Enrolments: what the authority knows of a member besides its lease: its join request, and its addresses.

An enrolment is made durable together with the grant. Without it, a restarted authority would know neither the addresses
nor the uplinks of its members, and would have to serve them all itself.
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
    """Addresses as others can dial them: a wildcard (`/ip4/0.0.0.0/...`) is replaced by the host of `seen_at`."""
    seen = seen_at is not None and seen_at.startswith(("/ip4/", "/ip6/")) and not is_circuit(seen_at)
    host = seen_at.split("/")[2] if seen and seen_at is not None else None
    observed: list[str] = []
    for addr in addrs:
        parts = addr.split("/")
        if len(parts) > 2 and parts[2] in ("0.0.0.0", "::"):
            if host is None:
                continue
            parts[1], parts[2] = "ip6" if ":" in host else "ip4", host
        observed.append("/".join(parts))
    return tuple(dict.fromkeys(observed))


MAX_PROBES: Final = 4
"""Addresses of one member that are dialed back; a ticket names as many of the seed."""

PROBE_AGAIN_S: Final = 600.0
"""Interval at which addresses are dialed back: machines move, and port mappings end."""


@dataclass(slots=True)
class Enrolment:
    """The enrolment of one member."""

    join: Join
    seen_at: str | None
    """The remote address of its last connection."""
    held_once: bool = False
    """Whether it has ever held a version."""
    newest: VersionId | None = None
    """The newest version that it reported, since it joined or the authority started."""
    proven: bool = False
    """Whether others got verified bytes from it, so that it may be an interior node."""
    dialed: tuple[str, ...] = ()
    """The addresses at which it answered when it was last dialed back."""
    probed_at: float = float("-inf")
    """Local time at which it was last dialed back."""
    saving: bool = False
    """Whether it reported that its daily upload limit is nearly used up, so that plans give it no children."""

    def claims(self) -> tuple[str, ...]:
        """The direct addresses that it claims, to be dialed back.

        Private addresses of a member that connects from the public network are left out: they are of another network.
        Names are left out too, since they could lead to any host of ours: members resolve their names themselves.
        """
        seen, addrs = scope(self.seen_at), observed_addresses(self.join.addrs, self.seen_at)
        return tuple(a for a in addrs if not is_circuit(a) and not is_name(a) and scope(a) >= seen)[:MAX_PROBES]

    def member(self, slot: int, peer: bytes, *, leaf: bool) -> Member:
        """The roster's entry of the member.

        It has the member's relayed addresses (circuits) as claimed, except those that could lead other members into
        their own networks: names, and addresses of a narrower scope than that at which we see the member.
        """
        join, seen = self.join, scope(self.seen_at)
        circuits = tuple(a for a in join.addrs if is_circuit(a) and not is_name(a) and scope(a) >= seen)
        return Member(
            slot, peer, self.dialed + circuits[:MAX_PROBES], bool(self.dialed), join.name, join.region, join.up_mbit,
            leaf, scope(self.seen_at),
        )  # fmt: skip


class Enrolments(dict[bytes, Enrolment]):
    """Enrolments by peer. The authority dials members back, first and now and then, before it tells their addresses."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def probe(self, peer: bytes, now: float) -> None:
        """Dial a member back at the addresses that it claims."""
        enrolment = self[peer]
        enrolment.probed_at = now
        if claims := enrolment.claims():
            self._outbox.emit(Probe(peer, claims))

    def probed(self, event: Probed) -> bool:
        """Record the addresses at which a member answered; True if they changed."""
        enrolment = self.get(event.peer)
        if enrolment is None or enrolment.dialed == event.addrs:
            return False
        enrolment.dialed = event.addrs
        return True

    def probe_due(self, now: float) -> None:
        """Dial back the member that has waited longest, if due. One per call, since each costs a handshake."""
        due = [(known.probed_at, peer) for peer, known in self.items() if now - known.probed_at >= PROBE_AGAIN_S]
        if due:
            self.probe(min(due)[1], now)


_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes, str | None, tuple[str, ...], bool])


def record_of(sealed_grant: bytes, enrolment: Enrolment) -> bytes:
    """The record `grant/SLOT` to persist; an empty record stands for a released slot."""
    return msgspec.msgpack.encode(
        (sealed_grant, encode(enrolment.join), enrolment.seen_at, enrolment.dialed, enrolment.proven)
    )


def open_record(record: bytes) -> tuple[bytes, Enrolment]:
    """(sealed grant, enrolment) of a record. Raises `PeerError` if it is malformed."""
    sealed, join, seen_at, dialed, proven = unpack(_decoder, record, "grant record")
    message = decode(join)
    if not isinstance(message, Join):
        raise PeerError("grant record: holds no join")
    return sealed, Enrolment(message, seen_at, dialed=dialed, held_once=proven, proven=proven)
