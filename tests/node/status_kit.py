"""The keys of a status in JSON. Users and their programs read them, so they never change."""

import json
import types
from pathlib import Path
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec

GOLDEN: Final[dict[str, list[str]]] = json.loads((Path(__file__).parent / "status" / "golden_keys.json").read_text())
"""Paths of keys, in order, by the process that was asked: recorded from `status --json` of real processes before the
status had a schema. A new field adds a path here; a path that goes breaks a user's program."""
_MAPS: Final = (
    *("relays", "senders", "memory.parts", "refused", "unused", "unmet", "stripes[]", "work.nodes", "clients"),
    *("rewards.functions", "rewards.functions.*", "rewards.chosen"),
)
"""Ends of the paths of maps whose keys are data."""


def paths(value: Any, at: str = "") -> list[str]:
    """The paths of all keys in `value`, each once, in order; within a map, `*` stands for each key."""
    found: list[str] = []
    if isinstance(value, dict):
        for key, inner in value.items():
            path = f"{at}.*" if at.endswith(_MAPS) else f"{at}.{key}".lstrip(".")
            found += ([] if at.endswith(_MAPS) else [path]) + paths(inner, path)
    elif isinstance(value, list):
        for inner in value:
            found += paths(inner, f"{at}[]")
    return list(dict.fromkeys(found))


def example(kind: Any) -> Any:
    """A value of this type in which nothing is missing: every struct has all its fields, every container one item."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})
    if get_origin(kind) in (types.UnionType, Union):
        return example(get_args(kind)[0])
    match get_origin(kind), get_args(kind):
        case (origin, (item,)) if origin is list:
            return [example(item)]
        case (origin, (key, item)) if origin is dict:
            return {example(key): example(item)}
        case (origin, items) if origin is tuple:
            return tuple(example(item) for item in items)
    return kind()
