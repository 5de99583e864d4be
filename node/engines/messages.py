"""What a node and its engine's process say over their Unix socket. Weights never travel here: they go as descriptors.

    node                                    engine process
      <------------------------------------ Ready          after it connected
      Attach (replica) ------------------->  Proof          load, take every bit from the replica, hash what is live
      Stage (patch) ---------------------->  Done           in the background; generation goes on
      Commit ----------------------------->  Done           between two batches
      Generate --------------------------->  Completions
      Prove ------------------------------>  Proof
      Reload ----------------------------->  Proof

Each request has a number, which its answer repeats; instead of any answer there may be `Failed`.
"""

from typing import Annotated

import msgspec

from node.engines.base import Completion, Prompt, SamplingParams

__all__ = [
    "Attach",
    "Commit",
    "Completions",
    "Done",
    "Failed",
    "FromEngine",
    "FromNode",
    "Generate",
    "Proof",
    "Prove",
    "Ready",
    "Reload",
    "Stage",
]

Root = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Name = tuple[int, int]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Load the model of `folder`'s config and fill it from the replica whose descriptor comes along."""

    number: int
    layout: bytes
    folder: str
    version: Name
    root: Root


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Make ready the patch whose descriptor comes along; it leads to `version`. Replaces what was staged."""

    number: int
    version: Name


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Scatter what was staged for `version`, and be it."""

    number: int
    version: Name
    root: Root


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """One completion for each prompt."""

    number: int
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams


class Prove(msgspec.Struct, frozen=True, tag="prove"):
    """Hash the live parameters."""

    number: int


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Take every bit anew from the replica, which now holds `version`."""

    number: int
    version: Name
    root: Root


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process runs; nothing is loaded yet."""

    pid: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done; `seconds`: of staging, or the pause of a commit."""

    number: int
    seconds: float


class Completions(msgspec.Struct, frozen=True, tag="completions"):
    """In the order of the prompts."""

    number: int
    completions: tuple[Completion, ...]
    seconds: float


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The root that the live parameters add up to, read back out of the engine."""

    number: int
    root: Root


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done. `usage`: the user can fix it. `poisoned`: the engine serves nothing until reloaded."""

    number: int
    why: str
    usage: bool
    poisoned: bool


FromNode = Attach | Stage | Commit | Generate | Prove | Reload
FromEngine = Ready | Done | Completions | Proof | Failed
"""A message of a whole batch is bounded by the frame: `node.local.MAX_BODY_BYTES`."""
