"""The fields of a message or document: found in its type, so that nobody can add one that is not fuzzed.

A *kind* is one sort of message or document, with what a target needs to make a valid one. `Field` is a place in it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
import msgspec.inspect as types

from scenarios.fuzz.values import Mutation, mutations_of

__all__ = ["ENCODED", "Field", "Kind", "fields_of", "names_of", "plain"]

Path = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a plain value, and what it can be set to. `name`: `Report.links[].slot`."""

    name: str
    path: Path
    mutations: tuple[Mutation, ...]

    def put(self, tree: Any, mutation: Mutation, rng: random.Random) -> Any:
        """`tree` with this field changed; the tree itself may be altered."""
        if not self.path:
            return mutation.change(tree, rng)
        at = tree
        for step in self.path[:-1]:
            at = at[step]
        at[self.path[-1]] = mutation.change(at[self.path[-1]], rng)
        return tree


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] if data else data


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"\xff"
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


ENCODED: Final = (
    Mutation("valid", lambda data, rng: data),
    Mutation("empty", lambda data, rng: b""),
    Mutation("truncated", _cut),
    Mutation("a byte more", lambda data, rng: data + b"\0"),
    Mutation("twice in one", lambda data, rng: data + data),
    Mutation("bits flipped", _flip),
    Mutation("garbage", lambda data, rng: rng.randbytes(rng.randrange(1, 200))),
    Mutation("nested deep", lambda data, rng: b"\x91" * 5_000 + b"\xc0"),
)
"""What is done to the bytes of a whole, behind its encoder. The last three of `Deck` are about when it is sent."""

Make = Callable[[Any], Any]
Enclose = Callable[[Any, bytes], bytes]
Encode = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Kind:
    """`make(world)`: a valid plain value. `encode`: to bytes. `enclose(world, body)`: signed, and put into whatever
    carries it: what the target is given. `by_authority`: only the authority's key could sign it."""

    name: str
    fields: tuple[Field, ...]
    make: Make
    enclose: Enclose
    encode: Encode = msgspec.msgpack.encode
    by_authority: bool = False


def plain(value: Any) -> Any:
    """`value` as lists, dicts, numbers, text and bytes: as its encoding says it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


@cache
def _info(kind: Any) -> Any:
    return types.type_info(kind)


def fields_of(kind: Any, sample: Any, name: str = "") -> tuple[Field, ...]:
    """Every field of a message of type `kind`. `sample`: a plain value in which no list is empty and nothing is nil, so
    that each has a place."""
    info = _info(kind)
    return tuple(_walk(info, sample, (), name or kind.__name__, kind if isinstance(kind, type) else None))


def names_of(kind: Any, name: str = "") -> set[str]:
    """The names of all fields of the type, whatever a sample has."""
    return set(_names(_info(kind), name or kind.__name__))


def _chosen(info: types.Type, sample: Any) -> types.Type:
    """Of a union the part that the sample is of."""
    while isinstance(info, types.Metadata):
        info = info.type
    if not isinstance(info, types.UnionType):
        return info
    parts = [part for part in info.types if not isinstance(part, types.NoneType)]
    fits = {int: types.IntType, float: types.FloatType, str: types.StrType, bytes: types.BytesType,
            list: (types.ListType, types.VarTupleType), dict: (types.DictType, types.StructType)}  # fmt: skip
    return next((part for part in parts if isinstance(part, fits.get(type(sample), ()))), parts[0])


def _places(info: types.StructType) -> list[tuple[int | str, types.Field]]:
    """Where each field stands."""
    if info.array_like:
        first = 0 if info.tag is None else 1
        return [(first + i, field) for i, field in enumerate(info.fields)]
    return [(field.encode_name, field) for field in info.fields]


def _walk(info: types.Type, sample: Any, path: Path, name: str, cls: Any) -> Iterator[Field]:
    info = _chosen(info, sample)
    yield Field(name, path, tuple(mutations_of(info)))
    if isinstance(info, types.StructType):
        for place, field in _places(info):
            yield from _walk(field.type, sample[place], (*path, place), f"{name}.{field.name}", None)
    elif isinstance(info, types.ListType | types.VarTupleType):
        if sample:
            yield from _walk(info.item_type, sample[0], (*path, 0), f"{name}[]", None)
    elif isinstance(info, types.TupleType):
        for i, item in enumerate(info.item_types):
            yield from _walk(item, sample[i], (*path, i), f"{name}[{i}]", None)
    elif isinstance(info, types.DictType) and sample:
        key = next(iter(sample))
        yield from _walk(info.value_type, sample[key], (*path, key), f"{name}{{}}", None)


def _names(info: types.Type, name: str) -> Iterator[str]:
    while isinstance(info, types.Metadata):
        info = info.type
    if isinstance(info, types.UnionType):
        for part in info.types:
            if not isinstance(part, types.NoneType):
                yield from _names(part, name)
        return
    yield name
    if isinstance(info, types.StructType):
        for field in info.fields:
            yield from _names(field.type, f"{name}.{field.name}")
    elif isinstance(info, types.ListType | types.VarTupleType):
        yield from _names(info.item_type, f"{name}[]")
    elif isinstance(info, types.TupleType):
        for i, item in enumerate(info.item_types):
            yield from _names(item, f"{name}[{i}]")
    elif isinstance(info, types.DictType):
        yield from _names(info.value_type, f"{name}{{}}")
