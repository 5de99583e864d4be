"""A peer's identity: its raw key, and the PeerId text of it.

The code uses the raw Ed25519 public key (32 bytes). Users, tickets and other libp2p programs write a PeerId: the key as
a libp2p protobuf, in an identity multihash, in base58
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md). This module does not import py-libp2p, so that a
ticket can be read without it.
"""

from typing import Final

from codec.errors import PeerError
from codec.sign import PUBLIC_KEY_BYTES
from swarm.transport.base import PeerKey

__all__ = ["peer_id", "peer_key"]

# multihash: identity (0x00), 36 bytes; protobuf: field 1 = key type 1 (Ed25519), field 2 = 32 bytes.
_PREFIX: Final = bytes([0x00, 0x24, 0x08, 0x01, 0x12, PUBLIC_KEY_BYTES])
_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUES: Final = {letter: value for value, letter in enumerate(_ALPHABET)}
_MAX_CHARS: Final = 64  # an Ed25519 PeerId has 52; decoding takes quadratic time


def peer_id(key: PeerKey) -> str:
    """The PeerId ("12D3Koo...") of a 32-byte public key. Raises `ValueError` for another length."""
    if len(key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a peer key has {PUBLIC_KEY_BYTES} bytes, this one {len(key)}")
    data = _PREFIX + key
    number = int.from_bytes(data, "big")
    letters = []
    while number:
        number, rest = divmod(number, 58)
        letters.append(_ALPHABET[rest])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(letters))


def peer_key(text: str) -> PeerKey:
    """The 32-byte public key in the PeerId `text`. Raises `PeerError` unless it is an Ed25519 PeerId."""
    if not 0 < len(text) <= _MAX_CHARS:
        raise PeerError(f"peer id: {len(text)} characters")
    number = 0
    for letter in text:
        value = _VALUES.get(letter)
        if value is None:
            raise PeerError(f"peer id: {letter!r} is not a base58 character")
        number = number * 58 + value
    zeros = len(text) - len(text.lstrip("1"))
    data = b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
    if len(data) != len(_PREFIX) + PUBLIC_KEY_BYTES or not data.startswith(_PREFIX):
        raise PeerError("peer id: not an Ed25519 key")
    return data[len(_PREFIX) :]
