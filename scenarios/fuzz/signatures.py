"""Signatures that cost nothing, while fuzzing: what is looked for lies behind them.

A signature is a hash that names the signer, the domain and the body, so that everything that a real one refuses is
refused still. Anybody could make one; nobody here makes another's, but where a kind says so. Each check is counted, and
charged as what a real one costs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from blake3 import blake3

from codec import sign
from codec.errors import PeerError

__all__ = ["CHECK_S", "cheap", "checked"]

CHECK_S: Final = 1e-4
"""Processor time of one Ed25519 verification."""

checked = [0]
"""Signatures that were checked since the process began."""


def _signature(public: bytes, domain: bytes, body: bytes) -> bytes:
    return blake3(b"\0".join((public, domain, body))).digest(64)


def _verify(public: bytes, domain: bytes, body: bytes, signature: bytes) -> None:
    checked[0] += 1
    if signature != _signature(public, domain, body):
        raise PeerError(f"signature: not {public.hex()[:8]}'s over this {domain.decode(errors='replace')}")


def _sign(self: sign.Key, domain: bytes, body: bytes) -> bytes:
    return _signature(self.public, domain, body)


@contextmanager
def cheap(on: bool = True) -> Iterator[None]:
    """While this lasts, keys sign and check by hashes. Documents made before are not valid in it. `on` False: only
    count."""
    real_verify, real_sign = sign.verify, sign.Key.sign

    def counted(public: bytes, domain: bytes, body: bytes, signature: bytes) -> None:
        checked[0] += 1
        real_verify(public, domain, body, signature)

    sign.verify = _verify if on else counted
    if on:
        sign.Key.sign = _sign
    try:
        yield
    finally:
        sign.verify, sign.Key.sign = real_verify, real_sign
