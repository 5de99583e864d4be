"""Encrypts the rows of a saved state, so that only a holder of the swarm's secret key can read it.

ChaCha20-Poly1305 (RFC 8439) in the form STREAM (Hoang, Reyhanitabar, Rogaway and Vizar, 2015): the nonce of a row is
its number and whether it is the last one. So rows that are swapped, repeated, left out or cut off do not open. Each
state has a key of its own: HKDF-SHA256 (RFC 5869) of the secret key, with the record's random salt, and with its
serial, step, size and code as information; so a row of one state does not open as a row of another, nor under an
altered record. No nonce is used twice under a key, because a salt is 32 random bytes and a row's number occurs once.
"""

from struct import Struct as Packing
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from codec.errors import PeerError
from codec.sign import Key
from node.saved.record import StateRecord

__all__ = ["RowCipher"]

_LABEL: Final = b"swarm-node saved state 1 encryption"
_NONCE: Final = Packing(">3xQ?")


class RowCipher:
    """The rows of one saved state. Its record's `digests` do not matter: they come later than the first row."""

    def __init__(self, key: Key, record: StateRecord) -> None:
        """`key`: the swarm's secret key."""
        fields = (record.swarm, record.serial, record.step, record.size, record.needed, record.total)
        information = _LABEL + msgspec.msgpack.encode(fields)
        self._aead = ChaCha20Poly1305(HKDF(SHA256(), 32, record.salt, information).derive(key.seed))
        self._last = record.rows - 1

    def seal_row(self, row: int, content: bytes | memoryview) -> bytes:
        """The row encrypted: 16 bytes longer."""
        return self._aead.encrypt(_NONCE.pack(row, row == self._last), content, None)

    def open_row(self, row: int, sealed: bytes | memoryview) -> bytes:
        """The content of a row. Raises `PeerError` when it is not this row of this state, or the key is another one."""
        try:
            return self._aead.decrypt(_NONCE.pack(row, row == self._last), sealed, None)
        except InvalidTag as error:
            raise PeerError(f"saved state: row {row} does not open with this key") from error
