"""The codec's binary encoding of manifests, chunk headers and layouts, as lists of values that can be mutated.

The type of a value determines its encoding: an int is LEB128, text follows its length, bytes are written unchanged.
"""

import random
from typing import Any, Final

import msgspec

from codec.varint import MAX_INT
from scenarios.fuzz.inputs.fields import Field
from scenarios.fuzz.inputs.values import Mutation

__all__ = ["fields_of_values", "write"]


def _uint(value: int) -> bytes:
    value &= (1 << 70) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write(values: list[Any]) -> bytes:
    """Encode the values; a value of another type is left out."""
    out = bytearray()
    for value in values:
        if isinstance(value, int):
            out += _uint(value)
        elif isinstance(value, str):
            body = value.encode("utf-8", "surrogatepass")
            out += _uint(len(body)) + body
        elif isinstance(value, bytes | msgspec.Raw):
            out += bytes(value)
    return bytes(out)


def _raw(data: bytes) -> msgspec.Raw:
    return msgspec.Raw(data)


_INTEGERS: Final = (0, 1, 2, 14, 18, 19, 63, 64, 127, 128, 255, 1 << 16, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 32,
                    1 << 40, MAX_INT - 1, MAX_INT, 1 << 63, (1 << 64) - 1, -1)  # fmt: skip


def _set(value: Any) -> Mutation:
    return Mutation(str(value), lambda old, rng: value)


_OF_INT: Final = (
    *map(_set, _INTEGERS),
    Mutation("one more", lambda old, rng: old + 1 if isinstance(old, int) else old),
    Mutation("one less", lambda old, rng: max(0, old - 1) if isinstance(old, int) else old),
    Mutation("any", lambda old, rng: rng.getrandbits(rng.randrange(1, 63))),
    Mutation("not its shortest form", lambda old, rng: _raw(b"\x80\x00")),
    Mutation("without an end", lambda old, rng: _raw(b"\xff" * 12)),
)
_OF_BYTES: Final = (
    Mutation("empty", lambda old, rng: b""),
    Mutation("zeros", lambda old, rng: bytes(len(old))),
    Mutation("ones", lambda old, rng: b"\xff" * len(old)),
    Mutation("one shorter", lambda old, rng: old[:-1]),
    Mutation("one longer", lambda old, rng: old + b"\0"),
    Mutation("any", lambda old, rng: rng.randbytes(len(old))),
)
_OF_TEXT: Final = (
    Mutation("empty", lambda old, rng: ""),
    Mutation("long", lambda old, rng: "a" * 600),
    Mutation("longer than there is", lambda old, rng: _raw(b"\xff\x03abc")),
    Mutation("a byte that no text has", lambda old, rng: _raw(b"\x01\xff")),
    Mutation("a lone surrogate", lambda old, rng: "\ud800"),
    Mutation("up", lambda old, rng: "../../x"),
    Mutation("a zero", lambda old, rng: "a\0b"),
    Mutation("a root", lambda old, rng: "/etc/x"),
    Mutation("many wide letters", lambda old, rng: "\U0001f40d" * 128),
)
_OF_WHOLE: Final = (
    Mutation("one value left out", lambda old, rng: _without(old, rng)),
    Mutation("one value twice", lambda old, rng: _twice(old, rng)),
    Mutation("two values exchanged", lambda old, rng: _exchanged(old, rng)),
    Mutation("reversed", lambda old, rng: old[::-1]),
    Mutation("the last half twice", lambda old, rng: old + old[len(old) // 2 :]),
    Mutation("nothing", lambda old, rng: []),
)


def _without(old: list[Any], rng: random.Random) -> list[Any]:
    at = rng.randrange(len(old))
    return old[:at] + old[at + 1 :]


def _twice(old: list[Any], rng: random.Random) -> list[Any]:
    at = rng.randrange(len(old))
    return old[: at + 1] + old[at:]


def _exchanged(old: list[Any], rng: random.Random) -> list[Any]:
    a, b = rng.randrange(len(old)), rng.randrange(len(old))
    old[a], old[b] = old[b], old[a]
    return old


def fields_of_values(name: str, values: list[Any], names: list[str]) -> tuple[Field, ...]:
    """Return the fields of a document that is encoded as these values. `names`: one per value."""
    assert len(values) == len(names), name
    of = {int: _OF_INT, bytes: _OF_BYTES, str: _OF_TEXT}
    return (
        Field(name, (), _OF_WHOLE),
        *(
            Field(f"{name}.{each}", (i,), of[type(value)])
            for i, (each, value) in enumerate(zip(names, values, strict=True))
        ),
    )
