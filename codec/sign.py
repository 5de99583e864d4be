"""Ed25519 keys (RFC 8032), and signatures with domain separation.

Every signature covers `domain || 0x00 || body`, so that a signed heartbeat is never valid as a signed manifest. The
signed body is exactly the bytes that are sent: verify first, then decode.
"""

from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from codec.errors import PeerError

__all__ = ["PUBLIC_KEY_BYTES", "SIGNATURE_BYTES", "Key", "open_sealed", "verify"]

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64


class Key:
    """A private Ed25519 key. `public` (32 bytes) identifies it to peers."""

    def __init__(self, seed: bytes) -> None:
        """`seed`: the 32 secret bytes of RFC 8032."""
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public: bytes = self._private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> "Key":
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    def sign(self, domain: bytes, body: bytes) -> bytes:
        """The 64-byte signature of `body` under `domain`."""
        return self._private.sign(domain + b"\0" + body)

    def seal(self, domain: bytes, body: bytes) -> bytes:
        """`signature || body`, the form in which signed bytes are sent. `open_sealed` is the inverse."""
        return self.sign(domain, body) + body

    def __repr__(self) -> str:  # never print the secret
        return f"Key({self.public.hex()[:8]})"


@lru_cache(maxsize=64)
def _opened(public: bytes) -> Ed25519PublicKey:
    """The decoded key, cached: decoding costs half as much as a check, and one key signs all chunks of a swarm."""
    return Ed25519PublicKey.from_public_bytes(public)


def verify(public: bytes, domain: bytes, body: bytes, signature: bytes) -> None:
    """Raise `PeerError` unless `public` signed `body` under `domain`."""
    try:
        _opened(public).verify(signature, domain + b"\0" + body)
    except (InvalidSignature, ValueError) as error:
        raise PeerError(f"signature: not {public.hex()[:8]}'s over this {domain.decode(errors='replace')}") from error


def open_sealed(public: bytes, domain: bytes, sealed: bytes) -> bytes:
    """The body of `sealed`. Raises `PeerError` unless `public` signed it under `domain`."""
    body = sealed[SIGNATURE_BYTES:]
    verify(public, domain, body, sealed[:SIGNATURE_BYTES])
    return body
