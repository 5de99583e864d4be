"""Measures the sizes of all tables that can be reached from an object."""

import random
from collections import deque
from typing import Any, Final

import msgspec

__all__ = ["sizes_of"]

_LOOKED_AT: Final = 64
"""Entries per table whose own tables are measured; the other entries are assumed to be alike."""


def sizes_of(root: Any, name: str) -> dict[str, int]:
    """Return the number of entries by path, summed over all tables at one path (`core.sessions[].asked`).

    A bytearray counts in KiB.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(name, root)]
    while todo:
        path, at = todo.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, dict | list | set | frozenset | deque):
            found[path] = found.get(path, 0) + len(at)
            values = list(at.values() if isinstance(at, dict) else at)
            todo += [(f"{path}[]", value) for value in values[-_LOOKED_AT:] if _is_ours(value)]
        elif isinstance(at, bytearray):
            found[path] = found.get(path, 0) + len(at) // 1024
        elif _is_ours(at):
            todo += [(f"{path}.{key}", value) for key, value in _attributes(at)]
    return found


def _is_ours(value: Any) -> bool:
    if isinstance(value, dict | list | set | frozenset | deque | bytearray):
        return True
    module = type(value).__module__
    return module.startswith(("swarm.", "node.", "codec.")) and not isinstance(value, msgspec.Struct | random.Random)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    found = list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                found.append((slot, getattr(value, slot)))
    return [(key, each) for key, each in found if not callable(each) or _is_ours(each)]
