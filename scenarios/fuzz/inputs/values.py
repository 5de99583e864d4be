"""Mutations of a field: extremes of its type, and values of other types. Each is a named function of the old value.

Messages are mutated as plain values (lists, dicts, numbers, text, bytes) and encoded afterwards. A value that the
encoder would refuse, such as invalid UTF-8, is a `msgspec.Raw`, whose bytes the encoder copies unchanged.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import msgspec.inspect as types

__all__ = ["DEEP", "Mutation", "any_mutations", "mutations_of"]

Change = Callable[[Any, random.Random], Any]


class Mutation(NamedTuple):
    """A named change. `change(old, rng)` returns the new value; it may alter a list or dict in place."""

    name: str
    change: Change


def _to(value: Any) -> Change:
    if isinstance(value, list | dict):
        return lambda old, rng: value.copy()  # another mutation may alter it
    return lambda old, rng: value


DEEP: Final = msgspec.Raw(b"\x91" * 5_000 + b"\xc0")
"""Nested lists, deeper than any decoder may recurse."""
_DEEP_MAP: Final = msgspec.Raw(b"\x81\xa1a" * 5_000 + b"\xc0")
_LONG_LIST: Final = msgspec.Raw(b"\xdd\xff\xff\xff\xff")
"""A list that announces 2^32 - 1 elements and has none."""
_LONG_BYTES: Final = msgspec.Raw(b"\xc6\xff\xff\xff\xff")
_LONG_TEXT: Final = msgspec.Raw(b"\xdb\xff\xff\xff\xff")
_NEVER: Final = msgspec.Raw(b"\xc1")
"""The only byte that MessagePack does not use."""
_EXTENSION: Final = msgspec.Raw(b"\xd6\xff\xff\xff\xff\xff")
"""A timestamp."""

_INTEGERS: Final = (0, 1, -1, 255, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
                    -(1 << 31), -(1 << 63))  # fmt: skip
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e-9, 1e7, 1e12, 1e300, 1.7976931348623157e308, math.nan, math.inf,
                  -math.inf)  # fmt: skip
_NO_UTF8: Final = {
    "a byte that no text has": b"\xff",
    "a lone surrogate": b"\xed\xa0\x80",
    "half a letter": b"abc\xe2\x82",
    "an overlong slash": b"\xc0\xaf",
}
_TEXTS: Final = {
    "a zero": "\0",
    "another line": "a\r\nb\n",
    "format": "%s{0}%n${x}",
    "turned": "\u202eabc",
    "many marks": "e" + "\u0301" * 40,
    "escape": "\x1b[2J\x1b]0;x\x07",
    "a long number": "9" * 60,
    "slashes": "/" * 60,
    "wildcard": "/ip4/0.0.0.0/tcp/1",
    "any six": "/ip6/::/tcp/1",
    "no host": "/ip4//tcp/",
    "no address": "/ip4/999.1.1.1/tcp/99999999999",
    "a name": "/dns4/localhost/tcp/22",
    "six with a zone": "/ip6/fe80::1%25eth0/tcp/1",
    "a circuit of nothing": "/p2p-circuit",
    "a circuit": "/ip4/198.51.100.9/tcp/4001/p2p/12D3KooWx/p2p-circuit",
    "circuits": "/p2p-circuit" * 20,
}
_OTHERS: Final = (
    ("nil", None),
    ("true", True),
    ("a number", 7),
    ("a fraction", 1.5),
    ("text", "7"),
    ("bytes", b"7"),
    ("a list", [1]),
    ("a map", {"a": 1}),
    ("nested deep", DEEP),
    ("maps nested deep", _DEEP_MAP),
    ("no value", _NEVER),
    ("an extension", _EXTENSION),
)


def any_mutations() -> Iterator[Mutation]:
    """Yield values of every type; at most one of them has the field's type."""
    for name, value in _OTHERS:
        yield Mutation(name, _to(value))


def _bounds(info: Any) -> list[Any]:
    """Return each bound of a number with its two neighbours."""
    found = [bound for bound in (info.ge, info.gt, info.le, info.lt) if bound is not None]
    return sorted({bound + step for bound in found for step in (-1, 0, 1)})


def _integers(info: Any) -> Iterator[Mutation]:
    values = [v for v in dict.fromkeys((*_bounds(info), *_INTEGERS)) if -(1 << 63) <= v < 1 << 64]
    for value in values:
        yield Mutation(str(value), _to(value))
    yield Mutation("one more", lambda old, rng: (old + 1) % (1 << 64))
    yield Mutation("one less", lambda old, rng: max(old - 1, -(1 << 63)))
    yield Mutation("any small", lambda old, rng: rng.randrange(64))
    yield Mutation("any", lambda old, rng: rng.getrandbits(rng.randrange(1, 64)))


def _numbers(info: Any) -> Iterator[Mutation]:
    for value in dict.fromkeys((*map(float, _bounds(info)), *_FLOATS)):
        yield Mutation(repr(value), _to(value))
    yield Mutation("nan with a sign", _to(msgspec.Raw(b"\xcb\xff\xf8\0\0\0\0\0\1")))
    for value in ((1 << 63) - 1, (1 << 64) - 1, -(1 << 63)):
        yield Mutation(f"{value} as an integer", _to(value))


def _lengths(info: Any) -> list[int]:
    """Return lengths at and beside the type's bounds, and a large one where there is no upper bound."""
    found = {0, 1}
    for bound in (info.min_length, info.max_length):
        if bound is not None:
            found |= {max(0, bound - 1), bound, bound + 1}
    return sorted(found | ({100_000} if info.max_length is None else set()))


def _texts(info: Any) -> Iterator[Mutation]:
    for length in _lengths(info):
        if length <= 1 << 20:
            yield Mutation(f"{length} letters", _to("a" * length))
            yield Mutation(f"{length} wide letters", _to("\U0001f40d" * min(length, 1 << 16)))
    for name, value in _TEXTS.items():
        yield Mutation(name, _to(value))
    for name, value in _NO_UTF8.items():
        yield Mutation(name, _to(msgspec.Raw(bytes([0xA0 + len(value)]) + value)))
    yield Mutation("longer than there is", _to(_LONG_TEXT))


def _binaries(info: Any) -> Iterator[Mutation]:
    for length in _lengths(info):
        if length <= 4 << 20:
            yield Mutation(f"{length} zeros", lambda old, rng, n=length: bytes(n))
            yield Mutation(f"{length} ones", lambda old, rng, n=length: b"\xff" * n)
    yield Mutation("any of its length", lambda old, rng: rng.randbytes(len(old)))
    yield Mutation("a bit flipped", _flipped)
    yield Mutation("cut", lambda old, rng: old[: rng.randrange(len(old) + 1)])
    yield Mutation("twice", lambda old, rng: old + old)
    yield Mutation("longer than there is", _to(_LONG_BYTES))


def _flipped(old: bytes, rng: random.Random) -> bytes:
    if not old:
        return b"\1"
    out = bytearray(old)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _lists(info: Any) -> Iterator[Mutation]:
    yield Mutation("empty", _to([]))
    yield Mutation("one fewer", lambda old, rng: old[:-1])
    yield Mutation("one more", lambda old, rng: [*old, old[-1] if old else 0])
    yield Mutation("repeated", lambda old, rng: list(old) * 3)
    yield Mutation("reversed", lambda old, rng: list(reversed(old)))
    yield Mutation("an element of another type", lambda old, rng: [*old, {}])
    yield Mutation("longer than there is", _to(_LONG_LIST))
    most = getattr(info, "max_length", None)
    for length in (most, most + 1) if most is not None else (1000,):
        if length <= 1 << 17:
            yield Mutation(f"{length} times", lambda old, rng, n=length: (old or [0])[:1] * n)
    yield Mutation("a thousand times", lambda old, rng: (old or [0])[:1] * 1000)


def _structs(info: types.Type) -> Iterator[Mutation]:
    assert isinstance(info, types.StructType)
    if info.array_like:
        yield Mutation("without its last field", lambda old, rng: old[:-1])
        yield Mutation("without any field", _to([]))
        yield Mutation("with one field more", lambda old, rng: [*old, 0])
        yield Mutation("with ten fields more", lambda old, rng: [*old, *range(10)])
        yield Mutation("with a field more, nested deep", lambda old, rng: [*old, DEEP])
        yield Mutation("two fields exchanged", _exchanged)
        yield Mutation("a field left out", lambda old, rng: _without(old, rng.randrange(max(1, len(old)))))
    else:
        yield Mutation("without any field", _to({}))
        yield Mutation("with one field more", lambda old, rng: old | {"zz": 1})
        yield Mutation("with a field more, nested deep", lambda old, rng: old | {"zz": DEEP})
        yield Mutation("a field left out", lambda old, rng: _without_key(old, rng))
        yield Mutation("a key that is no text", lambda old, rng: old | {7: 1})
    if info.tag is not None:
        for tag in (0, 127, -1, "zz", 1 << 63, b"x", None):
            yield Mutation(f"tag {tag!r}", lambda old, rng, tag=tag: _tagged(old, tag))


def _exchanged(old: list[Any], rng: random.Random) -> list[Any]:
    if len(old) > 1:
        a, b = rng.sample(range(len(old)), 2)
        old[a], old[b] = old[b], old[a]
    return old


def _without(old: Sequence[Any], index: int) -> list[Any]:
    return [*old[:index], *old[index + 1 :]]


def _without_key(old: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    gone = rng.choice(sorted(old)) if old else None
    return {key: value for key, value in old.items() if key != gone}


def _tagged(old: Any, tag: Any) -> Any:
    if isinstance(old, list):
        return [tag, *old[1:]]
    return old | {"type": tag}


def _maps(info: Any) -> Iterator[Mutation]:
    yield Mutation("empty", _to({}))
    yield Mutation("many", lambda old, rng: {str(i): i for i in range(1000)})
    yield Mutation("a key that is no text", lambda old, rng: old | {7: 1})
    yield Mutation("a value nested deep", lambda old, rng: old | {"zz": DEEP})
    yield Mutation("a key that is no UTF-8", _to(msgspec.Raw(b"\x81\xa1\xff\x01")))


def _words(info: Any) -> Iterator[Mutation]:
    values = info.values if isinstance(info, types.LiteralType) else [member.value for member in info.cls]
    for value in values:
        yield Mutation(str(value)[:20], _to(value))
    yield Mutation("no such word", _to("zz"))
    yield from (Mutation(name, _to(msgspec.Raw(bytes([0xA0 + len(v)]) + v))) for name, v in _NO_UTF8.items())


_OF_TYPE: Final[tuple[tuple[Any, Callable[[Any], Iterator[Mutation]]], ...]] = (
    (types.IntType, _integers),
    (types.FloatType, _numbers),
    (types.StrType, _texts),
    (types.BytesType, _binaries),
    ((types.ListType, types.VarTupleType, types.TupleType), _lists),
    (types.DictType, _maps),
    (types.StructType, _structs),
    ((types.LiteralType, types.EnumType), _words),
)


def mutations_of(info: types.Type) -> list[Mutation]:
    """Return all mutations of a field of this type."""
    found: list[Mutation] = []
    for kind, make in _OF_TYPE:
        if isinstance(info, kind):
            found += make(info)
    if isinstance(info, types.BoolType):
        found += [Mutation("the other", lambda old, rng: not old), Mutation("1", _to(1)), Mutation("0", _to(0))]
    return found + list(any_mutations())
