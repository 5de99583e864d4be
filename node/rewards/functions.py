"""The reward functions of this machine, by name, with their digests.

They come from `node.rewards.builtin`, from installed packages (entry points of the group `swarm_node.rewards`), and
from what the operator names: `NAME=MODULE:FUNCTION`, or `NAME=FILE.py:FUNCTION`. A later one takes the name of an
earlier one.

A digest is 16 hexadecimal digits of BLAKE3: over a version, where the function has an attribute `swarm_version`, else
over the source of its module. Nodes with one digest are expected to compute the same numbers, bit for bit.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from blake3 import blake3

from codec.errors import UsageError
from node.engines.base import REWARD_NAME
from node.rewards.builtin import BUILTIN, VERSION
from node.rewards.outcome import Reward

__all__ = ["GROUP", "MAX_REWARDS", "NamedReward", "built_in", "digest_of", "installed", "load", "parse_given"]

GROUP: Final = "swarm_node.rewards"
"""Of the entry points by which a package registers rewards."""
MAX_REWARDS: Final = 32
"""Of one node. Its abilities fit into one message."""


class NamedReward(NamedTuple):
    """A function under a name. `ability`: what a node that has it declares."""

    name: str
    function: Reward
    digest: str

    @property
    def ability(self) -> str:
        return f"reward:{self.name}@{self.digest}"


def parse_given(text: str) -> tuple[str, str, str]:
    """(name, module or file, function) of an operator's `NAME=MODULE:FUNCTION`. Raises `UsageError`."""
    name, _, place = text.partition("=")
    source, _, function = place.rpartition(":")
    if not REWARD_NAME.fullmatch(name) or not source or not function.isidentifier():
        raise UsageError(
            f"--reward {text}: write NAME=MODULE:FUNCTION, or NAME=FILE.py:FUNCTION. A name has 1 to 32 of the "
            "characters A-Z a-z 0-9 . _ -"
        )
    return name, source, function


def built_in() -> dict[str, NamedReward]:
    """The rewards of this release."""
    return {
        name: NamedReward(name, function, _hash(f"{name}/{VERSION}".encode())) for name, function in BUILTIN.items()
    }


def installed() -> tuple[EntryPoint, ...]:
    """The rewards that installed packages register, in the order of their names; nothing is imported."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))


def load(
    given: Sequence[str], points: Iterable[EntryPoint] | None = None
) -> tuple[dict[str, NamedReward], tuple[str, ...]]:
    """All rewards of this machine by name, and a sentence for each entry point (of `points`; by default those that
    are `installed`) that cannot be used.

    Raises `UsageError` for a given one that cannot be used, and for more than `MAX_REWARDS` of them.
    """
    found, unusable = built_in(), list[str]()
    for point in installed() if points is None else points:
        try:
            found[point.name] = _named(point.name, point.load())
        except Exception as error:  # importing a package of somebody else's may raise anything
            unusable.append(f"{point.name} of {point.value}: {type(error).__name__}: {error}"[:500])
    for text in given:
        name, source, function = parse_given(text)
        try:
            found[name] = _named(name, getattr(_module(source), function))
        except UsageError:
            raise
        except Exception as error:  # so may importing one of the operator's
            raise UsageError(f"--reward {text} cannot be used: {type(error).__name__}: {error}"[:500]) from error
    if len(found) > MAX_REWARDS:
        raise UsageError(f"--reward: a node can have {MAX_REWARDS} rewards in all; here are {len(found)}")
    return found, tuple(unusable)


def digest_of(function: Any) -> str:
    """See the text above. Raises `UsageError` for a function without a version whose source is not to be found."""
    version = getattr(function, "swarm_version", None)
    if version is not None:
        return _hash(f"version {version}".encode())
    try:
        module = inspect.getmodule(function)
        if module is None:
            raise OSError("it belongs to no module")
        return _hash(inspect.getsource(module).encode())
    except (OSError, TypeError) as error:
        raise UsageError(
            f"The source of the reward {function!r} cannot be read: give the function an attribute swarm_version."
        ) from error


def _named(name: str, function: Any) -> NamedReward:
    if not REWARD_NAME.fullmatch(name):
        raise UsageError(f"The reward {name!r}: a name has 1 to 32 of the characters A-Z a-z 0-9 . _ -")
    if not callable(function):
        raise UsageError(f"The reward {name} is of type {type(function).__name__}, and not a function.")
    return NamedReward(name, cast(Reward, function), digest_of(function))


def _module(source: str) -> Any:
    """The module of this name, or of this file."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).expanduser().absolute()
    name = f"swarm_reward_{path.stem}_{_hash(str(path).encode())[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{path} is no Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest(8)
