"""What an entry of the council's log says: statements for the ledger's book, and records of the seed's store.

Every machine of the council holds the swarm's key, so the sender is trusted; the statements are nevertheless executed
under an authorizer that lets them change rows and nothing else (`Journal`).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from node.ledger.statements import Statement

__all__ = ["Change", "decode_change", "encode_change"]

_MAX: Final = 1 << 20
_VALUES: Final = (int, float, str, bytes, type(None))
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Change(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry. The first entry of a term is empty."""

    statements: Annotated[tuple[tuple[str, tuple[Any, ...]], ...], msgspec.Meta(max_length=_MAX)] = ()
    """For the ledger's book, in their order: SQL with numbers, texts, bytes and None as values."""
    records: Annotated[tuple[tuple[Name, bytes], ...], msgspec.Meta(max_length=_MAX)] = ()
    """Of the seed's store, by name: grants, tickets, bars, the boot, attempts, and the newest seal (`seal`)."""
    dropped: Annotated[tuple[Name, ...], msgspec.Meta(max_length=_MAX)] = ()
    """Records that are forgotten."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Change)


def encode_change(
    statements: Sequence[Statement] = (), records: Sequence[tuple[str, bytes]] = (), dropped: Sequence[str] = ()
) -> bytes:
    """The body of an entry."""
    return _encoder.encode(Change(tuple(statements), tuple(records), tuple(dropped)))


def decode_change(body: bytes) -> Change:
    """Raises `PeerError` for anything but a change."""
    change = unpack(_decoder, body, "change") if body else Change()
    if not all(isinstance(value, _VALUES) for _, values in change.statements for value in values):
        raise PeerError("change: a statement has a value of another type")
    return change
