"""The interface between a node's engine process and the engine in it.

`node.engines.worker` drives every engine through `Engine`: it attaches the node's replica, reloads from it, stages and
commits weight patches, and asks for the root of the live parameters. An engine is downstream of the replica: a patch
holds absolute bits, so applying it twice does no harm, and the engine proves on demand what its live parameters hold.

Engines differ in how they generate, and each style has a class:

- `Engine` alone: `generate` returns when the whole batch is done. A commit waits for it.
- `SteppedEngine`: the caller's thread computes one token at a time. A commit falls between two tokens.
- `BackgroundEngine`: flights run in another process, and their ends are reported by callback.

`InProcessEngine` is for engines whose live parameters are arrays of this process; programs without a swarm use it
directly. `node.engines.transformers`, `node.engines.vllm.engine` and the tests' numpy engine implement the interface.
`tests/node/engines/test_engine_contract.py` runs one contract on all three.

Threads: `stage_patch` and `stage_adapter` may run in a thread of their own, and `read_blocks` in another one, while the
engine generates, because they change nothing that is served. All other calls come from one thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from codec import Layout, Replica, patch_hashes, read_patch, state_root
from codec.adapter import AdapterSlots
from node.engines.adapters import GivenAdapter
from node.engines.base import BASE_VERSION, Completion, DrawnTokens, EngineError, Prompt, SamplingParams, Version
from node.engines.judgement import Claim, Judgement
from node.engines.room import NO_ROOM_TOLD, Room

__all__ = [
    "BackgroundEngine",
    "Engine",
    "FlightDone",
    "FlightDraws",
    "InProcessEngine",
    "JudgeDone",
    "JudgingEngine",
    "ScoreDone",
    "ScoringEngine",
    "SharedReplica",
    "SteppedEngine",
    "TensorChanges",
    "WeightPatch",
]

TensorChanges = tuple[str, NDArray[np.int64], NDArray[np.unsignedinteger]]
"""(checkpoint tensor name, ascending flat indices, new bits) of some elements of one tensor.

The bits are unsigned integers as wide as an element of the tensor (uint16 for bf16). An iterator of changes may reuse
the arrays' memory for the next item.
"""

FlightDone = Callable[[int, list[Completion] | EngineError], None]
"""Called with a flight's number and its completions, or the reason why there are none."""
FlightDraws = Callable[[int, list[tuple[int, DrawnTokens]]], None]
"""Called with a flight's number and the tokens that it drew since the last call: (index of the prompt, its tokens)."""
ScoreDone = Callable[[tuple[float, ...] | EngineError], None]
"""Called with one log-probability a token, or the reason why there are none."""
JudgeDone = Callable[[Judgement | EngineError], None]
"""Called with a judgement, or the reason why there is none."""

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class SharedReplica:
    """The node's replica as its engine process sees it: mapped for reading only.

    The node may write new versions into it at any time. A reader that took bits of two versions finds out by the root.
    `fd`: its sealed memory, for passing on to other processes; open for the duration of the call that gets it.
    `folder`: config and tokenizer files. `slots`: the room that the swarm has for adapters; None: for none. `draft`:
    the small files of the draft model that the engine is to propose tokens by; its tensors are in the layout then.
    """

    replica: Replica
    fd: int
    folder: Path
    slots: AdapterSlots | None = None
    draft: Path | None = None

    @property
    def layout(self) -> Layout:
        return self.replica.layout


@dataclass(frozen=True, slots=True)
class WeightPatch:
    """The changed bits that lead to `version`, in sealed shared memory (the format is that of `codec.patch`).

    `fd` stays the caller's, and open for the duration of the call that gets it.
    """

    fd: int
    version: Version

    def tensor_changes(self) -> Iterator[TensorChanges]:
        """The changes, a tensor or a part of one at a time. Raises `PeerError` for memory that is not a patch."""
        return read_patch(self.fd)

    def block_hashes(self, layout: Layout) -> Iterator[tuple[int, bytes, bytes]]:
        """(block, its hash before the patch, its hash after it). Raises `PeerError` for another layout's patch."""
        return patch_hashes(self.fd, layout)


class Engine(ABC):
    """Generates from one model and takes new versions of it in place.

    Life: `attach_replica`, `reload_replica`, then any number of `generate`, `stage_patch`, `commit`, `live_root`,
    `reload_replica`. A commit that fails after it wrote something poisons the engine: `poisoned` says why, and
    `generate`, `stage_patch` and `commit` raise `EngineError` until `reload_replica` has written every bit anew. So an
    engine never serves a mix of two versions.
    """

    version: Version
    """The version of the live parameters, as the last commit or reload named it."""

    root: bytes
    """State root of that version (32 bytes, or empty when the caller did not give it)."""

    poisoned: str | None
    """Why the engine may not serve, or None."""

    abilities: frozenset[str] = frozenset()
    """A subset of `ABILITIES`, and possibly the engine's arithmetic class (`node.engines.arithmetic.class_label`).

    An engine gets no work that needs an ability which it does not name. What is measured is known once the engine holds
    a model: the node asks before the first attachment, and after every attachment and reload."""

    room: Room = NO_ROOM_TOLD
    """How much it generates at a time; known once it holds a model. A node gives no more to an engine that says nothing
    than to any other."""

    kind: str = ""
    """Engines of one kind draw the same tokens for the same seed, as far as their machines compute alike."""

    @abstractmethod
    def attach_replica(self, shared: SharedReplica) -> None:
        """Build the model that `shared.folder` describes, and map each tensor of the layout to its live parameter.

        The parameters hold nothing of use until `reload_replica`. Attaching again replaces the replica. Raises
        `UsageError`, with a sentence for the user, when the model is not the layout's or cannot be updated exactly.
        """

    @abstractmethod
    def reload_replica(self, version: Version, root: bytes) -> bytes:
        """Take every bit from the replica, clear the poison, and return the root that the live parameters hold.

        The caller must not use the engine unless that root is `root`: the replica may have moved on while it was read.
        Raises `EngineError` when nothing is attached.
        """

    @abstractmethod
    def stage_patch(self, patch: WeightPatch) -> None:
        """Make the patch ready without touching a live parameter. Replaces what was staged.

        Raises `ValueError`, `PeerError` or `EngineError`, with nothing staged, when the patch does not fit.
        """

    @abstractmethod
    def commit(self, version: Version, root: bytes) -> float:
        """Write what is staged into the live parameters and become `version`. Returns the pause in seconds."""

    @abstractmethod
    def live_root(self) -> bytes:
        """The root of the live parameters, read back out of the engine: 32 bytes. Works on a poisoned engine too."""

    @property
    def unreadable(self) -> str:
        """Why `read_blocks` cannot replace the node's own copy of the model; empty if it can. Known once filled."""
        return "this engine cannot give its weights back block by block"

    def read_blocks(self, blocks: Sequence[int], window: NDArray[np.uint8]) -> None:
        """Write the live bits of these blocks to their `places` in the window. No commit or reload runs meanwhile.

        A block whose live bits are none of a checkpoint's is written as zeros: the node compares hashes. Raises
        `EngineError` when `unreadable`.
        """
        raise EngineError(self.unreadable)

    # ------------------------------------------------------------ adapters

    def stage_adapter(self, adapter: GivenAdapter) -> bytes:
        """Make this version of an adapter ready, prove it, and return the root that its bits in the engine have.

        It is not served before `switch_adapter`. Replaces what was staged of any adapter. Raises `UsageError`, with a
        sentence for the user, for an adapter that the engine cannot serve; `EngineError` when the bits are not those of
        `adapter.root`; `PeerError` for memory or a configuration that is not an adapter's.
        """
        raise EngineError("this engine cannot serve adapters")

    def switch_adapter(self, slot: int) -> float:
        """Serve what is staged for this slot from the next step on. Returns the seconds without a step.

        Running sequences of the slot's adapter go on with the new bits, or fail if the slot had another adapter. No
        other sequence is affected. Raises `EngineError`, with nothing changed, when nothing is staged for the slot.
        """
        raise EngineError("this engine cannot serve adapters")

    def drop_adapter(self, slot: int) -> None:
        """Forget the slot's adapter; its running sequences fail. Does nothing for an empty slot."""
        _ = slot  # an engine without adapters has nothing to forget

    def adapter_root(self, slot: int) -> bytes:
        """The root of the slot: of the live bits, read back out of the engine, and of the configuration that was given.

        Zeros when a live value is not the adapter's. Raises `EngineError` for an empty slot.
        """
        raise EngineError(f"slot {slot} has no adapter")

    def version_of(self, adapter: str) -> Version:
        """The version that tokens of this adapter (empty: of the base) are drawn from now.

        Raises `EngineError` for an adapter that the engine does not hold.
        """
        if adapter:
            raise EngineError(f"this engine does not hold the adapter {adapter}")
        return self.version

    # ------------------------------------------------------------ generating

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> list[Completion]:
        """One completion for each prompt, in their order. Returns when all are done.

        `adapter`: the name of the adapter to draw by; empty: the base alone. A span's version is then the newer one of
        the engine's and the adapter's. Raises `EngineError` when the engine cannot serve, `ValueError` for prompts that
        the model cannot read.
        """


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that can tell the log-probabilities of given tokens. Nodes check each other's rollouts by it."""

    def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[float, ...]:
        """The log-probability of each of `token_ids` after `prompt` and the tokens before it, under the live version.

        It is defined as `Completion.logprobs`. A token just outside the nucleus (`SamplingParams.widest_top_p`) is
        scored as if it were inside; -inf means that no rounding would have let the token be drawn.
        """
        ...


@runtime_checkable
class JudgingEngine(Protocol):
    """An engine in this process that can judge what other nodes say they drew. It names the ability `JUDGES`."""

    def judge(self, claims: Sequence[Claim]) -> list[Judgement | Exception]:
        """A judgement of each claim under the live version, or the error for which there is none.

        Claims with `previous` are scored together under the version before, in one rewind: the last commit is undone
        for a moment; no step, no commit and no reader of the live bits falls into it. Raises `EngineError` when the
        engine cannot serve. Any exception in a rewind poisons the engine.
        """
        ...


class SteppedEngine(Engine):
    """An engine that computes one token at a time in the caller's thread.

    New flights begin while others run, and a commit between two steps loses no token: a completion that spans it has
    one span for each version. Whether the cache of the older version is computed anew is the engine's stated policy.
    """

    @abstractmethod
    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> None:
        """Start one completion for each prompt. `flight`: a number that is not in use.

        Raises, with nothing begun, `ValueError` for prompts that the model cannot read, and `EngineError` as `generate`
        does.
        """

    @abstractmethod
    def step(self) -> list[tuple[int, list[Completion] | EngineError]]:
        """Compute about one more token for every flight. Returns the flights that are done, with their completions, or
        why they cannot be continued.

        After any exception the caller must cancel every flight.
        """

    @abstractmethod
    def cancel(self, flight: int) -> None:
        """Drop a flight. Does nothing for an unknown one."""

    @abstractmethod
    def counts(self) -> dict[int, list[int]]:
        """Tokens so far of each prompt, by flight. Not empty while a flight runs."""

    def new_tokens(self, flight: int) -> list[tuple[int, DrawnTokens]]:
        """(index of the prompt, tokens) that a running flight drew since the last call, in order; empty for an unknown
        flight. An engine that implements it names the ability `STREAMS`."""
        _ = flight  # an engine without the ability tells nothing
        return []

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> list[Completion]:
        """One completion for each prompt, in their order. No flight may be running."""
        assert not self.counts(), "flights are running: use begin and step"
        self.begin(-1, prompts, sampling, adapter)
        try:
            while True:
                for _, outcome in self.step():
                    if isinstance(outcome, EngineError):
                        raise outcome
                    return outcome
        finally:
            self.cancel(-1)


class BackgroundEngine(Engine):
    """An engine that generates in other processes: `begin` and `begin_score` return at once.

    Flights that begin at different times share the engine's steps, so no sequence waits for a longer one, and a commit
    falls between two steps. The callbacks run in a thread of the engine's.
    """

    @abstractmethod
    def begin(
        self,
        flight: int,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        done: FlightDone,
        adapter: str = "",
        draws: FlightDraws | None = None,
    ) -> None:
        """Start one completion for each prompt. `flight`: a number that is not in use.

        Calls `done` once, unless the flight is cancelled first; before that `draws`, if it is given and the engine has
        the ability `STREAMS`, as tokens are drawn. Raises `EngineError`, with nothing begun, when the
        engine cannot serve.
        """

    @abstractmethod
    def begin_score(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        sampling: SamplingParams,
        done: ScoreDone,
        adapter: str = "",
    ) -> None:
        """Start scoring (see `ScoringEngine`). Calls `done` once; with an error when a commit fell into the scoring."""

    def begin_judge(self, claim: Claim, done: JudgeDone) -> None:
        """Start judging (see `JudgingEngine`). Calls `done` once. Raises `EngineError` when the engine cannot."""
        raise EngineError("this engine cannot judge tokens")

    @abstractmethod
    def cancel(self, flight: int) -> None:
        """Drop a flight. Does nothing for an unknown one."""

    @abstractmethod
    def counts(self) -> dict[int, list[int]]:
        """Tokens so far of each prompt, by flight."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> list[Completion]:
        """One completion for each prompt, in their order. Other flights may be running."""
        flight = min(self.counts(), default=0) - 1  # callers number theirs from 0
        future: Future[list[Completion]] = Future()
        self.begin(flight, prompts, sampling, lambda _, outcome: _settle(future, outcome), adapter)
        try:
            return future.result()
        finally:
            self.cancel(flight)

    def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[float, ...]:
        """See `ScoringEngine`. Raises `EngineError`."""
        future: Future[tuple[float, ...]] = Future()
        self.begin_score(prompt, token_ids, sampling, lambda outcome: _settle(future, outcome), adapter)
        return future.result()


def _settle(future: Future[Outcome], outcome: Outcome | EngineError) -> None:
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class InProcessEngine(Engine):
    """An engine whose live parameters are arrays of this process.

    A program can load a folder and give it bits directly: `load`, `attach`, then `stage`, `commit`, `reload` and
    `live_hashes`. The methods of `Engine` that take shared memory are made of these.
    """

    _shared: SharedReplica | None = None

    @abstractmethod
    def load(self, folder: Path, *, weights: bool = True) -> None:
        """Load a Hugging Face folder (config, weights). Raises `UsageError` when it is not one.

        Without `weights` only its config counts, and the parameters hold nothing of use until `reload`.
        """

    @abstractmethod
    def attach(self, layout: Layout, version: Version = BASE_VERSION, root: bytes = b"") -> None:
        """Map each tensor of `layout` to its live parameter; the engine then claims to hold `version`.

        It compares no bits: `live_hashes` does. Raises `UsageError` when the loaded model has other tensors, shapes or
        dtypes than the layout, or ties other tensors.
        """

    @abstractmethod
    def stage(self, changes: Iterable[TensorChanges]) -> None:
        """Convert and hold the next version's bits without touching a live parameter. Replaces what was staged.

        Raises `ValueError`, with nothing staged, when the changes do not fit the layout.
        """

    @abstractmethod
    def reload(self, bits: Callable[[str], NDArray[Any]], version: Version, root: bytes) -> None:
        """Write every tensor of the layout anew and clear the poison. `bits(name)`: all its elements, in any shape."""

    @abstractmethod
    def live_hashes(self, layout: Layout) -> NDArray[np.uint8]:
        """BLAKE3 of every block of `layout`, read back out of the live parameters: uint8, (n_blocks, 32).

        A tied tensor counts once, as in the layout. Works on a poisoned engine too.
        """

    def attach_replica(self, shared: SharedReplica) -> None:
        self._shared = shared
        self.load(shared.folder, weights=False)
        self.attach(shared.layout)

    def reload_replica(self, version: Version, root: bytes) -> bytes:
        self.reload(self._replica().bits, version, root)
        return self.live_root()

    def stage_patch(self, patch: WeightPatch) -> None:
        self.stage(patch.tensor_changes())

    def live_root(self) -> bytes:
        layout = self._replica().layout
        return state_root(layout.hash, self.live_hashes(layout))

    def _replica(self) -> Replica:
        if self._shared is None:
            raise EngineError("nothing is attached")
        return self._shared.replica
