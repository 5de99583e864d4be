"""The messages between a node and its engine's process, over their Unix socket.

No message contains weights: the replica and the patches are descriptors of shared memory.

    node                                    engine process
      <------------------------------------ Ready          after the process connected
      Attach (replica) ------------------->  Proof          load, take every bit from the replica, hash the live bits
      Stage (patch) ---------------------->  Done           in the background; generation goes on
      Commit ----------------------------->  Done           between two batches
      Generate --------------------------->  Progress..., Drawn..., Completions
      Cancel ----------------------------->                 drops a Generate, which gets no answer any more
      Score ------------------------------>  Scores
      Judge ------------------------------>  Judged         several at a time
      Read ------------------------------->  Done           in the background; generation goes on
      Prove ------------------------------>  Proof
      SetAdapter (weights) --------------->  AdapterProof   prepared in the background, switched between two steps
      DropAdapter ------------------------>  Done
      ProveAdapter ----------------------->  AdapterProof
      Reload ----------------------------->  Proof

Each request has a number, which its answer repeats. `Failed` may take the place of any answer.

`Ready.preemptible`: the engine can stop after any token, so a commit falls between two steps and several `Generate` may
run at once. Without it one runs at a time, and a commit waits for its end. `Ready.continuous_batching`: running
sequences share their steps, so each sequence may be a `Generate` by itself, and none waits for a longer one.
"""

from typing import Annotated, Final

import msgspec

from codec.adapter import CONFIG_BYTES, MAX_RANK, MAX_SLOTS, AdapterSlots
from node.engines.base import Completion, DrawnTokens, Prompt, SamplingParams
from node.engines.judgement import Claim, Judgement
from node.engines.room import NO_ROOM_TOLD, Room

__all__ = [
    "MAX_BLOCKS",
    "AdapterProof",
    "Attach",
    "Cancel",
    "Commit",
    "Completions",
    "Done",
    "Drawn",
    "DropAdapter",
    "Failed",
    "FromEngine",
    "FromNode",
    "Generate",
    "Judge",
    "Judged",
    "Progress",
    "Proof",
    "Prove",
    "ProveAdapter",
    "Read",
    "Ready",
    "Reload",
    "Score",
    "Scores",
    "SetAdapter",
    "Slots",
    "Stage",
]

MAX_BLOCKS: Final = 4096
"""Blocks of one `Read`: more small ones are read in several requests."""

Root = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], Number]
Abilities = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=64)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
"""The bounds are those of `node.ledger.messages`: the ledger gets these numbers, and drops a node that exceeds them."""
Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
AdapterName = Annotated[str, msgspec.Meta(max_length=64)]
"""Empty: the base model, without an adapter."""


class Slots(msgspec.Struct, frozen=True):
    """Room for adapters in the swarm's layout: see `codec.adapter.AdapterSlots`."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_SLOTS)]
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]
    elements: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]

    @classmethod
    def of(cls, slots: AdapterSlots | None) -> "Slots | None":
        return None if slots is None else cls(slots.count, slots.rank, slots.elements)


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Load the model of `folder`'s config, and fill it from the replica whose descriptor comes with the message.

    `read_back`: the engine's memory will be the node's only copy of the model in memory. The window for `Read` is a
    second descriptor then (`node.engines.window`), and an engine that cannot be read back refuses. `slots`: the room
    that the engine needs for adapters; None: the swarm has none. `draft`: as `folder`, of the draft model; empty: there
    is none to load. The layout is that of the base, with the draft model if that is to be loaded.
    """

    number: Number
    layout: bytes
    folder: str
    version: Name
    root: Root
    read_back: bool = False
    slots: Slots | None = None
    draft: str = ""


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Make the patch to `version` ready; its descriptor comes with the message. Replaces what was staged."""

    number: Number
    version: Name


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Write what was staged for `version` into the live parameters, and become it."""

    number: Number
    version: Name
    root: Root


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """One completion for each prompt. `streamed`: tell their tokens as they are drawn, if the engine can."""

    number: Number
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    adapter: AdapterName = ""
    streamed: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Drop the `Generate` whose number is `number`."""

    number: Number


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Give the log-probabilities of these tokens after this prompt, under the version that the engine holds."""

    number: Number
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterName = ""


class Judge(msgspec.Struct, frozen=True, tag="judge"):
    """Judge the tokens of this claim under the version that the engine holds."""

    number: Number
    claim: Claim


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Write the live bits of these blocks into the window."""

    number: Number
    blocks: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_BLOCKS)]


class Prove(msgspec.Struct, frozen=True, tag="prove"):
    """Hash the live parameters."""

    number: Number


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Take every bit from the replica again; it now holds `version`."""

    number: Number
    version: Name
    root: Root


class SetAdapter(msgspec.Struct, frozen=True, tag="set_adapter"):
    """Serve this version of an adapter. The descriptor of the slot's weights (sealed, bf16) comes with the message.

    `config`: the slot's configuration tensor. `version`: the swarm's, that last changed the adapter. The engine serves
    it only if its live bits have this root; an older version of it is served until then. Running sequences of the
    adapter go on with the new bits.
    """

    number: Number
    slot: Slot
    config: Annotated[bytes, msgspec.Meta(min_length=CONFIG_BYTES, max_length=CONFIG_BYTES)]
    version: Name
    root: Root


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Forget the adapter in this slot, if there is one. Its sequences fail."""

    number: Number
    slot: Slot


class ProveAdapter(msgspec.Struct, frozen=True, tag="prove_adapter"):
    """Hash the live bits of the adapter in this slot."""

    number: Number
    slot: Slot


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process runs, and has loaded nothing yet.

    `preemptible`, `continuous_batching`: see the module. `scores`: it answers `Score`. `abilities`:
    `node.engines.interface.Engine.abilities`, those that it has whatever it loads. `kind`: engines of one kind draw the
    same tokens for the same seed.
    """

    pid: int
    preemptible: bool = msgspec.field(default=False, name="carries")
    scores: bool = False
    continuous_batching: bool = msgspec.field(default=False, name="joins")
    abilities: Abilities = ()
    kind: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out.

    `seconds`: the duration of staging, or the pause of a commit. `resume_s`: after a commit, the time until every
    sequence that was running had its next token.
    """

    number: Number
    seconds: Seconds
    resume_s: Seconds = 0.0


class Completions(msgspec.Struct, frozen=True, tag="completions"):
    """Answer to `Generate`, in the order of the prompts. `seconds`: how long it took."""

    number: Number
    completions: tuple[Completion, ...]
    seconds: Seconds


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The number of tokens that each prompt of a running `Generate` has so far."""

    number: Number
    counts: tuple[Number, ...]


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """Tokens that a running `Generate` drew since the last `Drawn`: (index of the prompt, its tokens). Those that are
    drawn last may come with `Completions` only."""

    number: Number
    rows: tuple[tuple[Number, DrawnTokens], ...]


class Scores(msgspec.Struct, frozen=True, tag="scores"):
    """Answer to `Score`: one log-probability a token, and the version that gave them."""

    number: Number
    logprobs: tuple[float, ...]
    version: Name


class Judged(msgspec.Struct, frozen=True, tag="judged"):
    """Answer to `Judge`."""

    number: Number
    judgement: Judgement


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The root of the live parameters, read back out of the engine.

    `abilities`: what the engine can do with the model that it holds, some of which is measured on this machine. Answers
    to `Attach` and `Reload` have them, and `room`.
    """

    number: Number
    root: Root
    abilities: Abilities | None = None
    room: Room = NO_ROOM_TOLD


class AdapterProof(msgspec.Struct, frozen=True, tag="adapter_proof"):
    """The root of an adapter's slot: of its live bits, read back out of the engine, and the configuration given.

    `pause_s`: the time in which the engine computed no token because of a `SetAdapter`.
    """

    number: Number
    root: Root
    pause_s: Seconds = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed. `usage`: the user can fix it. `poisoned`: the engine serves nothing until it is reloaded."""

    number: Number
    why: str
    usage: bool
    poisoned: bool


FromNode = (
    Attach
    | Stage
    | Commit
    | Generate
    | Cancel
    | Score
    | Judge
    | Read
    | Prove
    | Reload
    | SetAdapter
    | DropAdapter
    | ProveAdapter
)
FromEngine = Ready | Done | Completions | Progress | Drawn | Scores | Judged | Proof | AdapterProof | Failed
"""A message is at most as large as a frame: `node.ipc.framing.MAX_BODY_BYTES`."""
