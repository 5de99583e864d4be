"""What a node and its engine's process say over their Unix socket. Weights never travel here: they go as descriptors.

    node                                    engine process
      <------------------------------------ Ready          after it connected
      Attach (replica) ------------------->  Proof          load, take every bit from the replica, hash what is live
      Stage (patch) ---------------------->  Done           in the background; generation goes on
      Commit ----------------------------->  Done           between two batches
      Generate --------------------------->  Progress..., Completions
      Cancel ----------------------------->                 of a Generate; nothing is answered any more
      Score ------------------------------>  Scores
      Prove ------------------------------>  Proof
      Reload ----------------------------->  Proof

`Ready.preemptible`: the engine can stop after any token, so a commit falls between two steps and several `Generate` may
run at once; otherwise one runs at a time, and a commit waits for its end. `Ready.continuous_batching`: what runs at
once shares its steps, so each sequence is a `Generate` by itself, and none waits for a longer one. Each request has a
number, which its answer repeats; instead of any answer there may be `Failed`.
"""

from typing import Annotated

import msgspec

from node.engines.base import Completion, Prompt, SamplingParams

__all__ = [
    "Attach",
    "Cancel",
    "Commit",
    "Completions",
    "Done",
    "Failed",
    "FromEngine",
    "FromNode",
    "Generate",
    "Progress",
    "Proof",
    "Prove",
    "Ready",
    "Reload",
    "Score",
    "Scores",
    "Stage",
]

Root = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], Number]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
"""As in `node.ledger.messages`: the ledger is told, and drops a node whose numbers make no sense."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Load the model of `folder`'s config and fill it from the replica whose descriptor comes along."""

    number: Number
    layout: bytes
    folder: str
    version: Name
    root: Root


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Make ready the patch whose descriptor comes along; it leads to `version`. Replaces what was staged."""

    number: Number
    version: Name


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Scatter what was staged for `version`, and be it."""

    number: Number
    version: Name
    root: Root


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """One completion for each prompt."""

    number: Number
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody wants the completions of `Generate` number `number` any more."""

    number: Number


class Score(msgspec.Struct, frozen=True, tag="score"):
    """How likely are these tokens after this prompt, under the version held now?"""

    number: Number
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams


class Prove(msgspec.Struct, frozen=True, tag="prove"):
    """Hash the live parameters."""

    number: Number


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Take every bit anew from the replica, which now holds `version`."""

    number: Number
    version: Name
    root: Root


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process runs; nothing is loaded yet. `preemptible`, `continuous_batching`, `scores`, `abilities`: what its
    engine can do (`node.engines.base.ABILITIES`). `kind`: engines of one kind draw the same tokens for the same
    seed."""

    pid: int
    preemptible: bool = msgspec.field(default=False, name="carries")
    scores: bool = False
    continuous_batching: bool = msgspec.field(default=False, name="joins")
    abilities: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=64)] = ()
    kind: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done; `seconds`: of staging, or the pause of a commit. `resume_s`: after a commit, until everything that
    ran before it had its next token."""

    number: Number
    seconds: Seconds
    resume_s: Seconds = 0.0


class Completions(msgspec.Struct, frozen=True, tag="completions"):
    """In the order of the prompts."""

    number: Number
    completions: tuple[Completion, ...]
    seconds: Seconds


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Tokens so far, of each prompt of a `Generate` that runs."""

    number: Number
    counts: tuple[Number, ...]


class Scores(msgspec.Struct, frozen=True, tag="scores"):
    """One log-probability a token, and the version that gave them."""

    number: Number
    logprobs: tuple[float, ...]
    version: Name


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The root that the live parameters add up to, read back out of the engine."""

    number: Number
    root: Root


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done. `usage`: the user can fix it. `poisoned`: the engine serves nothing until reloaded."""

    number: Number
    why: str
    usage: bool
    poisoned: bool


FromNode = Attach | Stage | Commit | Generate | Cancel | Score | Prove | Reload
FromEngine = Ready | Done | Completions | Progress | Scores | Proof | Failed
"""A message of a whole batch is bounded by the frame: `node.ipc.framing.MAX_BODY_BYTES`."""
