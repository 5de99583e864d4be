"""The one place where bytes that somebody else wrote become values.

A msgspec decoder raises four different things for bytes that are not what they should be: `DecodeError`,
`ValidationError`, `UnicodeDecodeError` for text that is no UTF-8, and `RecursionError` for values nested too deep. A
caller that forgets one of them is ended by whoever sends it. So nobody calls a decoder on a peer's bytes directly
(`tests/test_guards.py` looks).
"""

from typing import TypeVar

import msgspec

from codec.errors import PeerError

__all__ = ["unpack"]

T = TypeVar("T")


def unpack(decoder: "msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T]", data: bytes | memoryview, what: str) -> T:
    """`data` as exactly one value of the decoder's type. `PeerError`, which begins with `what`, when it is none."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"{what}: {error}") from error
