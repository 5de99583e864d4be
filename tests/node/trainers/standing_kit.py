"""Modules that stand in for a trainer's, so that an adapter of it can be imported without the trainer."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def standing_in(module: str, **names: dict[str, Any]) -> Iterator[Any]:
    """`module`, imported while others stand in. `names`: what each holds; `a__b` is the module a.b."""
    standing: list[str] = []
    try:
        for name, holds in names.items():
            parts = name.split("__")
            for end in range(1, len(parts) + 1):
                part = ".".join(parts[:end])
                if part not in sys.modules:
                    sys.modules[part] = ModuleType(part)
                    standing.append(part)
            vars(sys.modules[".".join(parts)]).update(holds)
        sys.modules.pop(module, None)
        yield importlib.import_module(module)
    finally:
        for name in (*standing, module):
            sys.modules.pop(name, None)
