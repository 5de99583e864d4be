"""The fields of a message or document, derived from its type, so that a new field is fuzzed without further work.

A `Kind` is a type of message or document, with functions that make a valid one. A `Field` is a place in it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
import msgspec.inspect as types

from scenarios.fuzz.inputs.values import Mutation, mutations_of

__all__ = ["ENCODED", "Field", "Kind", "fields_of", "names_of", "plain"]

Path = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A place in a plain value, and the mutations for it. `name`: for example `Report.links[].slot`."""

    name: str
    path: Path
    mutations: tuple[Mutation, ...]

    def put(self, tree: Any, mutation: Mutation, rng: random.Random) -> Any:
        """Return `tree` with this field changed. The tree itself may be altered."""
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
"""Mutations of an encoded message or document. `scenarios.fuzz.run.WHEN` has those of the time when it is sent."""

Make = Callable[[Any], Any]
Enclose = Callable[[Any, bytes], bytes]
Encode = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of message or document.

    `make(world)` returns a valid plain value, `encode` encodes it, and `enclose(world, body)` signs the bytes and puts
    them into the message that the target is given. `by_authority`: only the authority's key can sign it.
    """

    name: str
    fields: tuple[Field, ...]
    make: Make
    enclose: Enclose
    encode: Encode = msgspec.msgpack.encode
    by_authority: bool = False


def plain(value: Any) -> Any:
    """Return `value` as lists, dicts, numbers, text and bytes, as its encoding has it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


@cache
def _info(kind: Any) -> Any:
    return types.type_info(kind)


def fields_of(kind: Any, sample: Any, name: str = "") -> tuple[Field, ...]:
    """Return every field of a message of type `kind`. `sample`: a plain value without empty lists and nil, so that each
    field has a place in it."""
    info = _info(kind)
    return tuple(_walk(info, sample, (), name or kind.__name__, kind if isinstance(kind, type) else None))


def names_of(kind: Any, name: str = "") -> set[str]:
    """Return the names of all fields of the type, independent of a sample."""
    return set(_names(_info(kind), name or kind.__name__))


def _chosen(info: types.Type, sample: Any) -> types.Type:
    """Return the member of a union that the sample belongs to."""
    while isinstance(info, types.Metadata):
        info = info.type
    if not isinstance(info, types.UnionType):
        return info
    parts = [part for part in info.types if not isinstance(part, types.NoneType)]
    fits = {int: types.IntType, float: types.FloatType, str: types.StrType, bytes: types.BytesType,
            list: (types.ListType, types.VarTupleType), dict: (types.DictType, types.StructType)}  # fmt: skip
    return next((part for part in parts if isinstance(part, fits.get(type(sample), ()))), parts[0])


def _places(info: types.StructType) -> list[tuple[int | str, types.Field]]:
    """Return each field with its index or key in the plain value."""
    if info.array_like:
        first = 0 if info.tag is None else 1
        return [(first + i, field) for i, field in enumerate(info.fields)]
    return [(field.encode_name, field) for field in info.fields]


def _walk(info: types.Type, sample: Any, path: Path, name: str, cls: Any) -> Iterator[Field]:
    info = _chosen(info, sample)
    yield Field(name, path, tuple(mutations_of(info)))
    if isinstance(info, types.StructType):
        for place, field in _places(info):
            if isinstance(place, int) and place >= len(sample):
                return  # an optional field that is not sent
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
