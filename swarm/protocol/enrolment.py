"""What the authority knows of a member beside its lease: how it asked to join, and where it was seen.

It is made durable together with the grant, for without it a restarted authority would know of its members neither
addresses nor uplinks, and would have to feed them all itself.
"""

from dataclasses import dataclass

import msgspec

from codec.errors import PeerError
from swarm.protocol.wire import Join, decode, encode

__all__ = ["Enrolment", "open_record", "record_of"]


@dataclass(slots=True)
class Enrolment:
    """One member's."""

    join: Join
    seen_at: str | None
    """Where the transport saw it when it joined."""
    held_once: bool = False
    """It has held a version: it may stand inside a tree."""


def record_of(sealed_grant: bytes, enrolment: Enrolment) -> bytes:
    """What is persisted under `grant/SLOT`; an empty record stands for a released slot."""
    return msgspec.msgpack.encode((sealed_grant, encode(enrolment.join), enrolment.seen_at))


def open_record(record: bytes) -> tuple[bytes, Enrolment]:
    """(sealed grant, enrolment). `PeerError` when the record is not one of ours."""
    try:
        sealed, join, seen_at = msgspec.msgpack.decode(record, type=tuple[bytes, bytes, str | None])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PeerError(f"grant record: {error}") from error
    message = decode(join)
    if not isinstance(message, Join):
        raise PeerError("grant record: holds no join")
    return sealed, Enrolment(message, seen_at)
