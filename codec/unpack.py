"""The only place that decodes msgpack or JSON from other processes.

For malformed bytes, a msgspec decoder raises one of four errors: `DecodeError`, `ValidationError`, `UnicodeDecodeError`
for text that is not UTF-8, and `RecursionError` for values that are nested too deeply. A peer could crash a caller that
does not catch all four. So no other code calls a decoder on a peer's bytes; `tests/test_guards.py` checks this.
"""

from typing import TypeVar

import msgspec

from codec.errors import PeerError

__all__ = ["unpack"]

T = TypeVar("T")


def unpack(decoder: "msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T]", data: bytes | memoryview, what: str) -> T:
    """Decode `data` as exactly one value of the decoder's type. Raises `PeerError`, which begins with `what`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"{what}: {error}") from error
