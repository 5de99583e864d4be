"""Token ids and log-probabilities as bytes, little-endian, as the messages between nodes and the ledger have them."""

from collections.abc import Sequence

import numpy as np

from codec.errors import PeerError
from node.ledger.fields import MAX_TOKENS

__all__ = ["pack_floats", "pack_tokens", "unpack_floats", "unpack_tokens"]


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises `ValueError` when one is out of range or there are too many."""
    if len(token_ids) > MAX_TOKENS:
        raise ValueError(f"{len(token_ids)} tokens is more than {MAX_TOKENS}")
    try:
        return np.asarray(token_ids, "<u4").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2^32 - 1: {error}") from error


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`. Raises `PeerError` when the length of `data` is not a multiple of 4 bytes."""
    if len(data) % 4:
        raise PeerError(f"token ids: {len(data)} bytes")
    return tuple(np.frombuffer(data, "<u4").tolist())


def pack_floats(values: tuple[float, ...] | list[float]) -> bytes:
    """Log-probabilities as little-endian f32."""
    return np.asarray(values, "<f4").tobytes()


def unpack_floats(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_floats`. Raises `PeerError` when the length of `data` is not a multiple of 4 bytes."""
    if len(data) % 4:
        raise PeerError(f"log-probabilities: {len(data)} bytes")
    return tuple(np.frombuffer(data, "<f4").tolist())
