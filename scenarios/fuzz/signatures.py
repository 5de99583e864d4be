"""Cheap signatures for fuzzing, so that more cases reach the code behind the signature checks.

A signature is a hash over the signer, the domain and the body, so every mismatch that a real signature detects is still
refused. Any process could forge one; the fuzzers only do so where a kind says so. Each check is counted, and charged
with the CPU time of a real one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from blake3 import blake3

from codec import sign
from codec.errors import PeerError

__all__ = ["CHECK_S", "cheap", "checked"]

CHECK_S: Final = 1e-4
"""CPU time of one Ed25519 verification."""

checked = [0]
"""Number of signatures checked since the process began."""


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
    """Make keys sign and verify with hashes inside the context. Documents signed outside are not valid inside.

    `on` False: real signatures, only counted.
    """
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
