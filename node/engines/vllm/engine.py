"""The driver of one vLLM: fills it from the replica, updates it and proves it. Imports neither torch nor vLLM.

vLLM's processes have the plugin of `plugin/`. Each tensor is in one of two classes:

- *Scattered*: the map that vLLM's own loader gave was proven, by reading the live bits back through it after that
  loader had filled them. Changes are written in place.
- *Loaded*: vLLM's loader computes something from the tensor (another dtype, a repacked or quantized weight). With each
  version that touches it, its modules are loaded again from the replica. The bits that the loader gets are hashed, and
  so is what the loader made of them, which must not change until the next load.
"""

import contextlib
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from codec import Layout, state_root
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS
from node.engines.adapters import GivenAdapter
from node.engines.base import (
    BASE_VERSION,
    JUDGES,
    OPTIONS,
    SCORE_OPTIONS,
    EngineError,
    Prompt,
    SamplingParams,
    Version,
)
from node.engines.interface import (
    BackgroundEngine,
    FlightDone,
    FlightDraws,
    JudgeDone,
    ScoreDone,
    SharedReplica,
    WeightPatch,
)  # fmt: skip
from node.engines.judgement import Claim, Judgement
from node.engines.room import NO_ROOM_TOLD, Room
from node.engines.vllm.adapters import VllmAdapters, adapter_flags, version_name
from node.engines.vllm.attached import FILL_WITHIN_S, MAP_WITHIN_S, Attached, Staged, give_weights
from node.engines.vllm.classes import Classes
from node.engines.vllm.compatibility import check_draft, check_files, merge_maps, not_reloadable, tensors_of
from node.engines.vllm.flights import Flights, begin_judge, begin_score
from node.engines.vllm.launch import Launcher
from node.engines.vllm.links import Listener, PluginFailed, PluginLink, wait
from node.engines.vllm.measured import measured
from node.engines.vllm.plugin.swarm_vllm.messages import (
    Changed,
    Check,
    Close,
    Commit,
    Connect,
    Did,
    Differs,
    Front,
    Learned,
    Load,
    Loaded,
    Mapped,
    Model,
    Open,
    Policy,
    Rank,
    Sources,
    Stage,
    Unchanged,
)
from node.engines.vllm.proof import live_blocks, wrong_blocks
from node.engines.vllm.speculation import DraftModel
from node.engines.window import places

__all__ = ["VllmEngine"]

CONNECT_WITHIN_S: Final = 60.0
STAGE_WITHIN_S: Final = 290.0
COMMIT_WITHIN_S: Final = 290.0
"""A commit with the policy `drain` waits until running requests are done."""
SHORT_S: Final = 60.0
"""Calls that move no weights."""
AUDITED_BLOCKS: Final = 4
"""Blocks read back after a commit, of the changed and of all: a defect in 1 of 100 is found within a few steps."""

_log = structlog.get_logger(__name__)


class VllmEngine(BackgroundEngine):
    """See `BackgroundEngine`. `policy`: what becomes of running requests at a commit."""

    kind = "vllm"
    program = "vLLM"
    """What the user knows the engine as."""

    def __init__(self, listener: Listener, policy: Policy = "continue", launcher: Launcher | None = None) -> None:
        """`listener`: where vLLM's processes connect. `launcher`: makes them connect; None: the caller does it."""
        self._listener = listener
        self._launcher = launcher
        self._can = frozenset({OPTIONS, SCORE_OPTIONS})
        """What it can do whatever it loads."""
        if launcher is not None:
            self._can, self.kind = launcher.abilities, launcher.kind
        self._measured: frozenset[str] | None = None
        """The abilities that are measured when it has been filled; None: not yet."""
        self.policy: Policy = policy
        self._attachment: Attached | None = None
        self._hashes: NDArray[np.uint8] | None = None
        """Of every block that the engine holds: uint8, (n_blocks, 32); None before the first reload."""
        self._classes: Classes | None = None
        self._staged: Staged | None = None
        self._flights = Flights()
        self._adapters = VllmAdapters()
        self._weights = threading.Lock()
        """Held while the live weights change or are read back."""
        self._random = random.Random()
        self.version: Version = BASE_VERSION
        self.root = b""
        self.poisoned: str | None = "nothing is attached"

    @property
    def abilities(self) -> frozenset[str]:  # type: ignore[override]
        """See `Engine`. With a draft model vLLM draws by random numbers of its own, and not by all options."""
        drafts = self._attachment is not None and self._attachment.shared.draft is not None
        return (frozenset() if drafts else self._can) | (self._measured or frozenset())

    @property
    def room(self) -> Room:  # type: ignore[override]
        """See `Engine`."""
        return NO_ROOM_TOLD if self._attachment is None else self._attachment.room

    @property
    def classes(self) -> Classes:
        """How each tensor is kept up to date. Raises `EngineError` before the first reload."""
        if self._classes is None:
            raise EngineError("the engine has not been filled yet")
        return self._classes

    # ------------------------------------------------------------ attaching

    def attach_replica(self, shared: SharedReplica) -> None:
        """See `Engine`. The node attaches again when its replica moved on while it was read; vLLM then stays."""
        if self._attachment is None:
            if self._launcher is not None:
                if self._launcher.loads_replica:
                    self.give_weights(shared.layout, shared.fd)
                room = () if shared.slots is None else adapter_flags(shared.layout, shared.slots)
                draft = None if shared.draft is None else DraftModel.of(shared.draft, shared.layout)
                self._launcher.launch(shared.folder, self._listener.path, room, draft)
            front = self._listener.next(CONNECT_WITHIN_S)
        else:
            front = self._attachment.front
            for rank in self._attachment.ranks:
                rank.retire()
        facts = front.hello
        if not isinstance(facts, Front):
            raise EngineError("a rank connected before the API server")
        if facts.refusal:
            raise UsageError(f"This {self.program} cannot follow the swarm. {facts.refusal}")
        check_files(shared.layout, facts, self.program)
        ranks, maps = self._map_ranks(front, facts.ranks, shared)
        modules, opaque = merge_maps(maps, self.program)
        self._attachment = Attached(front, ranks, shared, modules, opaque, frozenset(found.device for found in maps))
        self._hashes = None
        self._adapters.clear(front)
        learned = facts.learned if self._classes is None else self._classes.loaded
        self._classes = None if learned is None else Classes.of(learned, modules)
        self.poisoned = "it has not been filled yet"
        took = round(max(found.seconds for found in maps), 3)
        _log.info("mapped", tensors=len(shared.layout.tensors), ranks=len(ranks), seconds=took)

    def _map_ranks(
        self, front: PluginLink, count: int, shared: SharedReplica
    ) -> tuple[tuple[PluginLink, ...], list[Mapped]]:
        """Have every rank connect and map the layout. Raises `UsageError` when their model is another one."""
        connected = front.ask(lambda n: Connect(n, str(self._listener.path)))
        ranks = tuple(self._listener.next(CONNECT_WITHIN_S) for _ in range(count))
        tensors = tensors_of(shared.layout)
        asked = [rank.ask(lambda n: Model(n, tensors, BLOCK_ELEMENTS), [shared.fd]) for rank in ranks]
        try:
            maps = [wait(answer, Mapped, MAP_WITHIN_S) for answer in asked]
            wait(connected, Did, SHORT_S)
        except PluginFailed as error:
            with contextlib.suppress(EngineError):
                wait(connected, Did, SHORT_S)  # it may serve on without the swarm
            raise UsageError(f"{self.program}'s model and the swarm's are not the same: {error}") from error
        if sorted(rank.hello.rank for rank in ranks if isinstance(rank.hello, Rank)) != list(range(count)):
            raise EngineError(f"not every rank of {self.program} connected")
        return ranks, maps

    def give_weights(self, layout: Layout, fd: int) -> None:
        """Let a vLLM that is about to start load its first weights from the replica. `fd` stays the caller's."""
        own = os.dup(fd)
        self._listener.on_loader = lambda link: give_weights(link, layout, own)

    # ------------------------------------------------------------ filling and proving

    def reload_replica(self, version: Version, root: bytes) -> bytes:
        """See `Engine`. The bits go through vLLM's loaders and are read back; vLLM serves only if they are `root`."""
        attached = self._attached()
        layout = attached.layout
        with self._weights:
            self.poisoned = f"the reload of version {version} did not finish"
            self._staged = None
            hashes = self._learn() if self._classes is None else np.zeros((layout.n_blocks, 32), np.uint8)
            if (held := state_root(layout.hash, hashes)) != root:
                hashes = self._fill()
                held = state_root(layout.hash, hashes)
            self._hashes = hashes
            _log.info("filled", version=version, moved_on=held != root)
            if held == root:
                attached.front.get(lambda n: Open(n, version_name(version)), Did, SHORT_S)
                self.version, self.root, self.poisoned = version, root, None
        if held == root and self._measured is None:
            self._measured = self._measure()
        return held

    def _measure(self) -> frozenset[str]:
        attached = self._attached()
        judges, drafts, program = JUDGES in self._can, attached.shared.draft is not None, self.program.lower()
        held = attached.front, attached.ranks, self.policy, program, version_name(self.version)
        return frozenset(measured(*held, judges=judges, drafts=drafts))

    def _fill(self) -> NDArray[np.uint8]:
        """Load everything from the replica and read it back. Returns the hashes of the bits that were loaded."""
        attached = self._attached()
        layout = attached.layout
        took = attached.front.get(lambda n: Load(n, None), Changed, FILL_WITHIN_S)
        _log.info("loaded", seconds=round(took.pause_s, 3))
        hashes = self._loaded_hashes([tensor.name for tensor in layout.tensors])
        if wrong := self._wrong(self._scattered_blocks(), hashes):
            raise EngineError(f"the live bits of {layout.block(min(wrong)).name} are not what was loaded")
        return hashes

    def _learn(self) -> NDArray[np.uint8]:
        """Prove the map against what vLLM loaded at its start, and class the tensors. Returns the hashes of that load.

        Tensors that do not read back are repacked. They can be kept up to date if loading them again leaves what the
        first load left. Raises `UsageError` when it does not.
        """
        attached = self._attached()
        front, layout = attached.front, attached.layout
        hashes = self._loaded_hashes([tensor.name for tensor in layout.tensors])
        blocks = [b for t in layout.tensors if t.name not in attached.opaque for b in layout.blocks_of(t.name)]
        repacked = {layout.block(block).name for block in self._wrong(blocks, hashes)}
        reasons = attached.opaque | dict.fromkeys(repacked, "its live bits are not the checkpoint's: it is repacked")
        self._classes = Classes.of(reasons, attached.modules)
        loaded = self._classes.loaded
        check_draft(loaded)
        _log.info("classed", scattered=len(layout.tensors) - len(loaded), loaded=dict(Counter(loaded.values())))
        if loaded:
            try:
                took = front.get(lambda n: Check(n, tuple(sorted(loaded))), Changed, FILL_WITHIN_S)
            except PluginFailed as error:
                raise UsageError(not_reloadable(loaded, str(error), self.program)) from error
            _log.info("reloadable", tensors=len(loaded), seconds=round(took.pause_s, 3))
        front.get(lambda n: Learned(n, loaded), Did, SHORT_S)
        return hashes

    def _scattered_blocks(self) -> list[int]:
        layout, loaded = self._attached().layout, self.classes.loaded
        return [block for t in layout.tensors if t.name not in loaded for block in layout.blocks_of(t.name)]

    def _loaded_hashes(self, names: Sequence[str]) -> NDArray[np.uint8]:
        """The known hashes of the version, with those of `names` replaced by what the loaders got.

        Zeros where two ranks read different bits.
        """
        attached = self._attached()
        layout = attached.layout
        hashes = np.zeros((layout.n_blocks, 32), np.uint8) if self._hashes is None else self._hashes.copy()
        asked = [rank.ask(Loaded) for rank in attached.ranks]
        found = [wait(answer, Sources, FILL_WITHIN_S).hashes for answer in asked]
        for name in names:
            read = {by_name.get(name) for by_name in found}
            blocks = layout.blocks_of(name)
            digests = (read.pop() if len(read) == 1 else None) or bytes(32 * len(blocks))
            hashes[blocks.start : blocks.stop] = np.frombuffer(digests, np.uint8).reshape(len(blocks), 32)
        return hashes

    def _wrong(self, blocks: Sequence[int], hashes: NDArray[np.uint8]) -> set[int]:
        attached = self._attached()
        return wrong_blocks(attached.shared.replica, attached.ranks, blocks, hashes)

    @property
    def unreadable(self) -> str:
        """See `Engine`. Loaded tensors are computed from the checkpoint's, and are loaded again from the replica."""
        return self._attached().unreadable(self.classes.loaded, self.program)

    def read_blocks(self, blocks: Sequence[int], window: NDArray[np.uint8]) -> None:
        """See `Engine`. The ranks write their parts of each block."""
        attached = self._attached()
        found = {place.block: place.view(window) for place in places(attached.layout, blocks)}
        with self._weights:
            for block, bits in live_blocks(attached.layout, attached.ranks, sorted(found)):
                found[block][:] = bits

    def live_hashes(self) -> NDArray[np.uint8]:
        """BLAKE3 of every block: uint8, (n_blocks, 32); zeros where the engine does not hold what it should.

        Blocks of scattered tensors are read back out of vLLM. For loaded tensors they are the hashes of what their
        loaders got, as long as what the loaders made of it is unchanged.
        """
        attached = self._attached()
        layout = attached.layout
        with self._weights:
            if self._hashes is None:
                raise EngineError("the engine has not been filled yet")
            loaded = tuple(self.classes.loaded)
            out = self._hashes.copy()
            for block in self._wrong(self._scattered_blocks(), out):
                out[block] = 0
            if loaded:
                asked = [rank.ask(lambda n: Unchanged(n, loaded)) for rank in attached.ranks]
                for name in {name for answer in asked for name in wait(answer, Differs, FILL_WITHIN_S).names}:
                    blocks = layout.blocks_of(name)
                    out[blocks.start : blocks.stop] = 0
            return out

    def live_root(self) -> bytes:
        return state_root(self._attached().layout.hash, self.live_hashes())

    # ------------------------------------------------------------ versions

    def stage_patch(self, patch: WeightPatch) -> None:
        """See `Engine`: every rank makes the patch ready while it generates.

        Raises `EngineError`, with nothing staged, when a rank cannot, or the patch is for another base.
        """
        attached = self._attached()
        layout = attached.layout
        self._refuse_if_poisoned()
        self._staged = None
        assert self._hashes is not None
        hashes, touched = self._hashes.copy(), []
        for block, before, after in patch.block_hashes(layout):
            if hashes[block].tobytes() != before:
                raise EngineError(f"the patch to {patch.version} is for another base than {self.version}")
            hashes[block] = np.frombuffer(after, np.uint8)
            touched.append(block)
        names = {layout.block(block).name for block in touched}
        scattered = tuple(sorted(names - set(self.classes.loaded)))
        version = version_name(patch.version)
        asked = [rank.ask(lambda n: Stage(n, version, scattered), [patch.fd]) for rank in attached.ranks]
        for answer in asked:
            wait(answer, Did, STAGE_WITHIN_S)
        self._staged = Staged(patch.version, hashes, tuple(touched), self.classes.to_load(names))

    def commit(self, version: Version, root: bytes) -> float:
        """See `Engine`. Returns the seconds in which vLLM ran no step.

        Raises `EngineError` before anything is written when the staged patch leads elsewhere; poisons the engine when
        it fails later.
        """
        attached = self._attached()
        self._refuse_if_poisoned()
        staged, self._staged = self._staged, None
        if staged is None or staged.version != version:
            raise EngineError(f"{version} is not what is staged ({None if staged is None else staged.version})")
        if state_root(attached.layout.hash, staged.hashes) != root:
            raise EngineError(f"what is staged leads from {self.version} to something else than {version}")
        with self._weights:
            name, to_load = version_name(version), staged.to_load
            try:
                took = attached.front.get(lambda n: Commit(n, name, self.policy, to_load), Changed, COMMIT_WITHIN_S)
            except PluginFailed as error:
                if error.touched:
                    self.poisoned = f"the commit of version {version} failed: {error}"
                raise
            except EngineError as error:
                self.poisoned = f"the commit of version {version} did not finish: {error}"
                raise
            self._hashes, self.version, self.root = staged.hashes, version, root
            self._check_committed(staged)
        if to_load:
            _log.info("loaded", version=version, tensors=len(to_load), seconds=round(took.loaded_s, 3))
        return took.pause_s

    def _check_committed(self, staged: Staged) -> None:
        """Check that loaded modules got the version's bits, and read a sample of the other blocks back.

        Stops the engine and raises `EngineError` when something differs.
        """
        layout = self._attached().layout
        if staged.to_load and (self._loaded_hashes(staged.to_load) != staged.hashes).any():
            self._poison(f"the replica was past {staged.version} when modules were loaded from it")
        scattered = self._scattered_blocks()
        changed = sorted(set(staged.touched) & set(scattered))
        sample = set(self._random.sample(changed, min(AUDITED_BLOCKS, len(changed))))
        sample |= set(self._random.sample(scattered, min(AUDITED_BLOCKS, len(scattered))))
        for block in self._wrong(sorted(sample), staged.hashes):
            self._poison(f"the live bits of {layout.block(block).name} are not those of version {staged.version}")

    def _poison(self, why: str) -> None:
        front = self._attached().front
        self.poisoned = why
        front.get(lambda n: Close(n, why), Did, SHORT_S)
        raise EngineError(why)

    # ------------------------------------------------------------ adapters

    def stage_adapter(self, adapter: GivenAdapter) -> bytes:
        """See `Engine`: every rank writes and reads it where no step reads."""
        self._refuse_if_poisoned()
        return self._adapters.stage(self._attached(), adapter)

    def switch_adapter(self, slot: int) -> float:
        """See `Engine`. Poisons the engine when some ranks switched and others did not."""
        self._refuse_if_poisoned()
        try:
            return self._adapters.switch(self._attached().front, slot, self.policy)
        except PluginFailed as error:
            self.poisoned = str(error) if error.touched else None
            raise

    def drop_adapter(self, slot: int) -> None:
        if self._attachment is not None:
            self._adapters.drop(self._attachment.front, slot)

    def adapter_root(self, slot: int) -> bytes:
        return self._adapters.root(self._attached(), slot)

    def version_of(self, adapter: str) -> Version:
        return max(self.version, self._adapters.named(adapter)[1]) if adapter else self.version

    # ------------------------------------------------------------ generating

    def begin(
        self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams, done: FlightDone, adapter: str = "",
        draws: FlightDraws | None = None,
    ) -> None:  # fmt: skip
        front, (number, _) = self._asked(adapter)
        self._flights.begin(front, flight, prompts, sampling, done, number, draws, lambda: self.version_of(adapter))

    def begin_score(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        sampling: SamplingParams,
        done: ScoreDone,
        adapter: str = "",
    ) -> None:
        front, (number, own) = self._asked(adapter)
        names = [version_name(version) for version in ((self.version, own) if adapter else (self.version,))]
        begin_score(front, "/".join(names), prompt, token_ids, sampling, done, number)

    def _asked(self, adapter: str) -> tuple[PluginLink, tuple[int, Version]]:
        """(the front, the adapter's id in vLLM and version; 0 without one). Raises `EngineError`."""
        front = self._attached().front
        self._refuse_if_poisoned()
        return front, self._adapters.named(adapter) if adapter else (0, self.version)

    def begin_judge(self, claim: Claim, done: JudgeDone) -> None:
        """See `BackgroundEngine`. A failure in a rewind poisons the engine."""
        front, (number, _) = self._asked(claim.adapter)

        def judged(outcome: Judgement | EngineError) -> None:
            if isinstance(outcome, PluginFailed) and outcome.touched:
                self.poisoned = str(outcome)
            done(outcome)

        def replay(alike: bool) -> None:
            try:
                if not alike:
                    raise EngineError("it cannot replay tokens of this adapter: a row's bits depend on its batch")
                begin_judge(front, claim, judged, number)
            except EngineError as error:
                done(error)

        if claim.replay and number:
            self._adapters.when_measured(front, claim.adapter, replay)
        else:
            begin_judge(front, claim, judged, number)

    def cancel(self, flight: int) -> None:
        self._flights.cancel(None if self._attachment is None else self._attachment.front, flight)

    def counts(self) -> dict[int, list[int]]:
        return self._flights.counts()

    def close(self) -> None:
        """Disconnect. A vLLM that the user runs goes on with the version that it has."""
        self._listener.close()

    def _attached(self) -> Attached:
        if self._attachment is None:
            raise EngineError("nothing is attached")
        return self._attachment

    def _refuse_if_poisoned(self) -> None:
        if self.poisoned is not None:
            raise EngineError(f"poisoned, reload it: {self.poisoned}")
