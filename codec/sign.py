"""Ed25519 keys, and signatures that cannot be mistaken for one another.

Every signature covers `domain || 0x00 || body`, so that a signed heartbeat can never pass as a signed manifest. What is
signed is the exact bytes that travel: verify first, then decode.
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
    """A private Ed25519 key. `public` (32 bytes) is the identity that peers know it by."""

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
        """`signature || body`: how signed things travel. `open_sealed` is the other way."""
        return self.sign(domain, body) + body

    def __repr__(self) -> str:  # never print the secret
        return f"Key({self.public.hex()[:8]})"


@lru_cache(maxsize=64)
def _opened(public: bytes) -> Ed25519PublicKey:
    """Decoding a key costs half as much as checking a signature by it, and one key signs all chunks of a swarm."""
    return Ed25519PublicKey.from_public_bytes(public)


def verify(public: bytes, domain: bytes, body: bytes, signature: bytes) -> None:
    """Raise `PeerError` unless `public` signed `body` under `domain`."""
    try:
        _opened(public).verify(signature, domain + b"\0" + body)
    except (InvalidSignature, ValueError) as error:
        raise PeerError(f"signature: not {public.hex()[:8]}'s over this {domain.decode(errors='replace')}") from error


def open_sealed(public: bytes, domain: bytes, sealed: bytes) -> bytes:
    """The body of `sealed` if `public` signed it under `domain`; `PeerError` otherwise. Else no content."""
    body = sealed[SIGNATURE_BYTES:]
    verify(public, domain, body, sealed[:SIGNATURE_BYTES])
    return body
