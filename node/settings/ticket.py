"""Tickets: everything that a machine needs to join, in one string that can be copied and pasted.

    swarm1<base32 of: length (u16, big-endian) || body || checksum>

The body is a MessagePack array: the authority's public key, addresses at which to reach it, the sealed capability
(opaque here: `swarm.protocol.membership.lease` opens it, and only the authority judges it), and the name of the
swarm's tuning preset. Base32 has no characters that a chat program, a command line or a double click treats specially,
and ignores case. The length tells a truncated ticket, which is the common mistake, from a mistyped one.
"""

import base64
import binascii
import re
from typing import Annotated, Final

import msgspec
from blake3 import blake3

from codec.errors import UsageError
from codec.sign import PUBLIC_KEY_BYTES
from node.settings.addresses import address, relay_address
from node.settings.config import MAX_ADDRESSES, Preset
from swarm.protocol.core.reach import CIRCUIT, is_circuit

__all__ = ["MAX_TICKET_CHARS", "TICKET_VERSION", "Ticket"]

TICKET_VERSION: Final = 1
MAX_TICKET_CHARS: Final = 4096
_CHECKSUM_BYTES: Final = 4
"""One mistyped ticket in 2^32 passes, and then its capability does not verify."""
_PREFIX: Final = f"swarm{TICKET_VERSION}"


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The contents of a ticket. The constructor raises `ValueError`, `parse` raises `UsageError`."""

    authority: Annotated[bytes, msgspec.Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
    """Ed25519 public key, which identifies the swarm."""
    addrs: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)
    ]
    """Multiaddr text without the authority's peer id: direct addresses, and circuits through its relays."""
    capability: Annotated[bytes, msgspec.Meta(min_length=1, max_length=1024)]
    """Sealed bytes, as the authority signed them."""
    preset: Preset

    def __post_init__(self) -> None:
        try:
            canonical = tuple(
                relay_address(text.removesuffix(CIRCUIT)) + CIRCUIT if is_circuit(text) else address(text)
                for text in self.addrs
            )
        except UsageError as error:
            raise ValueError(f"addrs: {error}") from error
        if canonical != self.addrs:
            raise ValueError("addrs: not multiaddr text")

    def __str__(self) -> str:
        body = msgspec.msgpack.encode(self)
        framed = len(body).to_bytes(2, "big") + body
        framed += blake3(framed).digest()[:_CHECKSUM_BYTES]
        text = _PREFIX + base64.b32encode(framed).decode().rstrip("=").lower()
        if len(text) > MAX_TICKET_CHARS:
            raise ValueError(f"a ticket of {len(text)} characters is longer than one may be")
        return text

    @classmethod
    def parse(cls, text: str) -> "Ticket":
        """The ticket in `text`; line breaks, spaces and case are ignored. Raises `UsageError`."""
        if len(text) > 2 * MAX_TICKET_CHARS:
            raise UsageError("This is far too long to be a ticket. Paste only what swarm-node invite printed.")
        text = re.sub(r"\s+", "", text).lower().strip("'\"")
        _check_prefix(text)
        letters = text[len(_PREFIX) :]
        try:
            # Text of a length that base32 cannot have is cut and decoded: the length inside says how much is missing.
            whole = letters[: len(letters) - (len(letters) % 8 in (1, 3, 6))]
            framed = base64.b32decode(whole.upper() + "=" * (-len(whole) % 8))
        except (binascii.Error, ValueError) as error:
            raise UsageError(_DAMAGED) from error
        expected = 2 + int.from_bytes(framed[:2], "big") + _CHECKSUM_BYTES
        if len(framed) < expected or len(framed) < 2:
            raise UsageError(
                f"This ticket is cut off: {len(text)} of {len(_PREFIX) + -(-expected * 8 // 5)} characters are here. "
                "Copy it whole, from swarm to its last letter."
            )
        body, checksum = framed[2 : expected - _CHECKSUM_BYTES], framed[expected - _CHECKSUM_BYTES :]
        if blake3(framed[: expected - _CHECKSUM_BYTES]).digest()[:_CHECKSUM_BYTES] != checksum:
            raise UsageError(_DAMAGED)
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise UsageError(
                f"This ticket is invalid ({error}). Ask for a new one: swarm-node invite, on the seed's machine."
            ) from error


_DAMAGED: Final = "This ticket was damaged in copying: a character is wrong or missing. Copy it again, whole."


def _check_prefix(text: str) -> None:
    ask = "Ask for one: swarm-node invite, on the seed's machine."
    if text.startswith(("12d3koo", "/ip", "/dns")):
        raise UsageError(f"This is an address or a peer id, not a ticket. {ask}")
    match = re.match(r"swarm(\d)", text)
    if match is None:
        raise UsageError(f'This is not a ticket: tickets begin with "{_PREFIX}". {ask}')
    if int(match[1]) != TICKET_VERSION:
        raise UsageError(
            f"This ticket is of version {match[1]} and this swarm-node reads version {TICKET_VERSION}. "
            "Install the release that the seed runs."
        )
