"""The driver: fills, updates and proves one vLLM, whose processes have the plugin. Imports neither torch nor vLLM.

Each tensor is of one of two classes. *Scattered*: the map that vLLM's own loader gave was proven, by reading the live
bits back through it after that loader had filled them; its changes are written in place. *Loaded*: the loader computes
something of it (another dtype, a repacked or quantized weight), so its modules are loaded anew from the replica with
each version that touches them; what the loader was given is hashed, what it made is hashed too, and must stay so.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from codec import Layout, Replica, patch_hashes, state_root
from codec.checkpoint import is_model_file
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS
from node.engines.base import EngineError, Prompt, SamplingParams, Version
from node.engines.vllm.classes import Classes
from node.engines.vllm.flights import Completed, Flights, ScoresFound, score
from node.engines.vllm.links import Link, Listener, PluginFailed, wait
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
    Tensor,
    Unchanged,
)
from node.engines.vllm.proof import wrong_blocks

__all__ = ["VllmEngine"]

CONNECT_WITHIN_S: Final = 60.0
MAP_WITHIN_S: Final = 600.0
"""A mixture of experts has tens of thousands of tensors, of some milliseconds each."""
FILL_WITHIN_S: Final = 1500.0
STAGE_WITHIN_S: Final = 290.0
COMMIT_WITHIN_S: Final = 290.0
"""A commit may have to wait until running requests are done."""
SHORT_S: Final = 60.0
AUDITED_BLOCKS: Final = 4
"""After each version: so many of the blocks that it changed and so many of the others. A defect in one block of a
hundred is found within a few steps; all of them are looked at on demand."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Staged:
    version: Version
    hashes: NDArray[np.uint8]
    touched: tuple[int, ...]
    to_load: tuple[str, ...]


class VllmEngine:
    """One vLLM. Flights run by themselves; every other call comes from one thread, except `stage` (from another)."""

    def __init__(self, listener: Listener, policy: Policy = "continue") -> None:
        """`listener`: where vLLM's processes connect. `policy`: what becomes of running requests at a commit."""
        self._listener = listener
        self.policy: Policy = policy
        self._front: Link | None = None
        self._ranks: list[Link] = []
        self._layout: Layout | None = None
        self._replica: Replica | None = None
        self._hashes: NDArray[np.uint8] | None = None
        self._classes: Classes | None = None
        self._staged: _Staged | None = None
        self._flights = Flights()
        self._weights = threading.Lock()
        """Held while the live weights change or are looked at."""
        self._chance = random.Random()
        self.version: Version = (0, 0)
        self.root = b""
        self.poisoned: str | None = "nothing is attached"

    @property
    def attached(self) -> bool:
        """vLLM's API server is connected."""
        return self._front is not None

    @property
    def classes(self) -> Classes:
        """How each tensor is kept up to date. Raises `EngineError` before the first reload."""
        if self._classes is None:
            raise EngineError("the engine has not been filled yet")
        return self._classes

    # ------------------------------------------------------------ attaching

    def attach(self, layout: Layout, replica: Replica, fd: int) -> None:
        """Take the front that connects next, and have every rank map the layout. `fd`: the replica's; stays the
        caller's.

        Raises `UsageError` with a sentence when this vLLM cannot be updated exactly, or serves another model.
        """
        for rank in self._ranks:  # the node attaches again when its replica moved on while it was read
            rank.retire()
        front = self._front or self._listener.next(CONNECT_WITHIN_S)
        facts = front.hello
        if not isinstance(facts, Front):
            raise EngineError("a rank connected before the API server")
        if facts.refusal:
            raise UsageError(f"This vLLM cannot follow the swarm. {facts.refusal}")
        _check_files(layout, facts)
        connected = front.ask(lambda n: Connect(n, str(self._listener.path)))
        ranks = [self._listener.next(CONNECT_WITHIN_S) for _ in range(facts.ranks)]
        asked = [rank.ask(lambda n: Model(n, _tensors(layout), BLOCK_ELEMENTS), [fd]) for rank in ranks]
        try:
            maps = [wait(answer, Mapped, MAP_WITHIN_S) for answer in asked]
            wait(connected, Did, SHORT_S)
        except PluginFailed as error:
            raise UsageError(f"vLLM's model and the swarm's are not the same: {error}") from error
        if sorted(rank.hello.rank for rank in ranks if isinstance(rank.hello, Rank)) != list(range(facts.ranks)):
            raise EngineError("not every rank of vLLM connected")
        self._front, self._ranks = front, ranks
        self._layout, self._replica, self._hashes = layout, replica, None
        self._modules, self._opaque = _merge(maps)
        learned = facts.learned if self._classes is None else self._classes.loaded
        self._classes = None if learned is None else Classes.of(learned, self._modules)
        self.poisoned = "it has not been filled yet"
        _log.info(
            "mapped", tensors=len(layout.tensors), ranks=len(ranks), seconds=round(max(m.seconds for m in maps), 3)
        )

    def give_weights(self, layout: Layout, fd: int) -> None:
        """Let a vLLM that is about to be started load its first weights from the replica. `fd` stays the caller's."""
        own = os.dup(fd)
        self._listener.on_loader = lambda link: _give(link, layout, own)

    # ------------------------------------------------------------ filling and proving

    def reload(self, version: Version, root: bytes) -> bytes:
        """Take every bit from the replica through vLLM's own loaders, and read it back. Serves if it is `root`.

        Returns the root that the engine now holds; another one when the replica moved on meanwhile.
        """
        front, layout, _ = self._attached()
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
                front.get(lambda n: Open(n, _text(version)), Did, SHORT_S)
                self.version, self.root, self.poisoned = version, root, None
            return held

    def _fill(self) -> NDArray[np.uint8]:
        """Load everything from the replica and read it back; the hashes of what was loaded."""
        front, layout, _ = self._attached()
        took = front.get(lambda n: Load(n, None), Changed, FILL_WITHIN_S)
        _log.info("loaded", seconds=round(took.pause_s, 3))
        hashes = self._taken([tensor.name for tensor in layout.tensors])
        if wrong := self._wrong(self._scattered_blocks(), hashes):
            raise EngineError(f"the live bits of {layout.block(min(wrong)).name} are not what was loaded")
        return hashes

    def _learn(self) -> NDArray[np.uint8]:
        """Prove the map against what vLLM loaded at its start; the hashes of that.

        Tensors that do not read back are repacked; they can be followed if loading them again makes of them what the
        first load did. Raises `UsageError` when it does not.
        """
        front, layout, _ = self._attached()
        hashes = self._taken([tensor.name for tensor in layout.tensors])
        blocks = [b for t in layout.tensors if t.name not in self._opaque for b in layout.blocks_of(t.name)]
        repacked = {layout.block(block).name for block in self._wrong(blocks, hashes)}
        reasons = self._opaque | dict.fromkeys(repacked, "its live bits are not the checkpoint's: it is repacked")
        self._classes = Classes.of(reasons, self._modules)
        loaded = self._classes.loaded
        _log.info("classed", scattered=len(layout.tensors) - len(loaded), loaded=dict(Counter(loaded.values())))
        if loaded:
            try:
                took = front.get(lambda n: Check(n, tuple(sorted(loaded))), Changed, FILL_WITHIN_S)
            except PluginFailed as error:
                raise UsageError(_not_reloadable(loaded, str(error))) from error
            _log.info("reloadable", tensors=len(loaded), seconds=round(took.pause_s, 3))
        front.get(lambda n: Learned(n, loaded), Did, SHORT_S)
        return hashes

    def _scattered_blocks(self) -> list[int]:
        _, layout, _ = self._attached()
        loaded = self.classes.loaded
        return [block for t in layout.tensors if t.name not in loaded for block in layout.blocks_of(t.name)]

    def _taken(self, names: Sequence[str]) -> NDArray[np.uint8]:
        """The version's hashes as they are known, and those of `names` as they were loaded; zeros where two ranks read
        different bits."""
        _, layout, _ = self._attached()
        hashes = np.zeros((layout.n_blocks, 32), np.uint8) if self._hashes is None else self._hashes.copy()
        asked = [rank.ask(Loaded) for rank in self._ranks]
        found = [wait(answer, Sources, FILL_WITHIN_S).hashes for answer in asked]
        for name in names:
            read = {each.get(name) for each in found}
            blocks = layout.blocks_of(name)
            digests = read.pop() if len(read) == 1 else None
            hashes[blocks.start : blocks.stop] = (
                0 if digests is None else np.frombuffer(digests, np.uint8).reshape(len(blocks), 32)
            )
        return hashes

    def _wrong(self, blocks: Sequence[int], hashes: NDArray[np.uint8]) -> set[int]:
        _, layout, replica = self._attached()
        return wrong_blocks(layout, replica, self._ranks, blocks, hashes)

    def live_hashes(self) -> NDArray[np.uint8]:
        """BLAKE3 of every block: uint8, (n_blocks, 32); zeros where the engine does not hold what it should.

        Blocks of scattered tensors are read back out of it. Of loaded ones it is what their loaders were given, as
        long as what these made of it is unchanged.
        """
        _, layout, _ = self._attached()
        with self._weights:
            if self._hashes is None:
                raise EngineError("the engine has not been filled yet")
            loaded = tuple(self.classes.loaded)
            out = self._hashes.copy()
            for block in self._wrong(self._scattered_blocks(), out):
                out[block] = 0
            if loaded:
                asked = [rank.ask(lambda n: Unchanged(n, loaded)) for rank in self._ranks]
                for name in {name for answer in asked for name in wait(answer, Differs, FILL_WITHIN_S).names}:
                    blocks = layout.blocks_of(name)
                    out[blocks.start : blocks.stop] = 0
            return out

    # ------------------------------------------------------------ versions

    def stage(self, fd: int, version: Version) -> None:
        """Have every rank make the patch ready while it generates. `fd`: see `codec.write_patch`; stays the caller's.

        Raises `EngineError`, with nothing staged, when a rank cannot.
        """
        _, layout, _ = self._attached()
        self._refuse_if_poisoned()
        self._staged = None
        assert self._hashes is not None
        hashes, touched = self._hashes.copy(), []
        for block, before, after in patch_hashes(fd, layout):
            if hashes[block].tobytes() != before:
                raise EngineError(f"the patch to {version} is for another base than {self.version}")
            hashes[block] = np.frombuffer(after, np.uint8)
            touched.append(block)
        names = {layout.block(block).name for block in touched}
        scattered = tuple(sorted(names - set(self.classes.loaded)))
        asked = [rank.ask(lambda n: Stage(n, _text(version), scattered), [fd]) for rank in self._ranks]
        for answer in asked:
            wait(answer, Did, STAGE_WITHIN_S)
        self._staged = _Staged(version, hashes, tuple(touched), self.classes.to_load(names))

    def commit(self, version: Version, root: bytes) -> float:
        """Become `version`: the seconds in which the engine ran no step.

        Raises `EngineError` before anything is written when what is staged leads elsewhere; poisons the engine when
        it fails later.
        """
        front, layout, _ = self._attached()
        self._refuse_if_poisoned()
        staged, self._staged = self._staged, None
        if staged is None or staged.version != version:
            raise EngineError(f"{version} is not what is staged ({None if staged is None else staged.version})")
        if state_root(layout.hash, staged.hashes) != root:
            raise EngineError(f"what is staged leads from {self.version} to something else than {version}")
        with self._weights:
            name, to_load = _text(version), staged.to_load
            try:
                took = front.get(lambda n: Commit(n, name, self.policy, to_load), Changed, COMMIT_WITHIN_S)
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

    def _check_committed(self, staged: _Staged) -> None:
        """What was loaded is the version's, and a sample of the others reads back as it must; else stop the engine."""
        _, layout, _ = self._attached()
        if staged.to_load and (self._taken(staged.to_load) != staged.hashes).any():
            self._poison(f"the replica was past {staged.version} when modules were loaded from it")
        others = self._scattered_blocks()
        changed = sorted(set(staged.touched) & set(others))
        sample = set(self._chance.sample(changed, min(AUDITED_BLOCKS, len(changed))))
        sample |= set(self._chance.sample(others, min(AUDITED_BLOCKS, len(others))))
        for block in self._wrong(sorted(sample), staged.hashes):
            self._poison(f"the live bits of {layout.block(block).name} are not those of version {staged.version}")

    def _poison(self, why: str) -> None:
        front, _, _ = self._attached()
        self.poisoned = why
        front.get(lambda n: Close(n, why), Did, SHORT_S)
        raise EngineError(why)

    # ------------------------------------------------------------ flights

    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams, done: Completed) -> None:
        """Start one completion for each prompt; `done(flight, outcome)` is called from another thread."""
        front, _, _ = self._attached()
        self._refuse_if_poisoned()
        self._flights.begin(front, flight, prompts, sampling, done)

    def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, done: ScoresFound
    ) -> None:
        """How likely are `token_ids` after `prompt`, under the version held now? See `flights.score`."""
        front, _, _ = self._attached()
        self._refuse_if_poisoned()
        score(front, prompt, token_ids, sampling, self.version, done)

    def cancel(self, flight: int) -> None:
        """Forget a flight; one that is not known is no matter."""
        self._flights.cancel(self._front, flight)

    def counts(self) -> dict[int, list[int]]:
        """Tokens so far, of each flight's prompts in their order."""
        return self._flights.counts()

    def close(self) -> None:
        """Hang up. A vLLM that runs by itself goes on with what it has."""
        for link in (self._front, *self._ranks):
            if link is not None:
                link.retire()
        self._listener.close()

    # ------------------------------------------------------------

    def _attached(self) -> tuple[Link, Layout, Replica]:
        if self._front is None or self._layout is None or self._replica is None:
            raise EngineError("nothing is attached")
        return self._front, self._layout, self._replica

    def _refuse_if_poisoned(self) -> None:
        if self.poisoned is not None:
            raise EngineError(f"poisoned, reload it: {self.poisoned}")


def _check_files(layout: Layout, facts: Front) -> None:
    """Config, tokenizer and chat template decide what tokens mean: `UsageError` unless they are the swarm's."""
    for spec in layout.files:
        theirs = facts.files.get(spec.name)
        if theirs is None:
            raise UsageError(f"vLLM's model folder lacks the swarm's {spec.name}: serve a copy of the swarm's base.")
        if theirs != spec.hash:
            raise UsageError(f"vLLM's {spec.name} is not the swarm's: serve a copy of the swarm's base, unchanged.")
    ours = {spec.name for spec in layout.files}
    for name in sorted(facts.files):
        if is_model_file(name) and name not in ours:  # a chat template of its own would be taken before the tokenizer's
            raise UsageError(f"vLLM's model folder has a {name} that the swarm's has not: serve a copy of its base.")


def _tensors(layout: Layout) -> tuple[Tensor, ...]:
    return tuple(Tensor((t.name, *t.aliases), t.dtype, t.shape, layout.offset(t.name)) for t in layout.tensors)


def _give(link: Link, layout: Layout, fd: int) -> None:
    """A worker process takes its first weights; the replica's descriptor stays ours."""
    try:
        link.get(lambda n: Model(n, _tensors(layout), BLOCK_ELEMENTS), Did, FILL_WITHIN_S, [fd])
    except EngineError as error:
        _log.warning("first_load", why=str(error))
    finally:
        link.retire()


def _merge(maps: Sequence[Mapped]) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """All ranks' modules and reasons, by tensor."""
    modules = {name: frozenset(module for each in maps for module in each.modules[name]) for name in maps[0].modules}
    opaque = {name: why for each in maps for name, why in each.opaque.items()}
    missing = [name for name in modules if name not in opaque and not any(each.covered[name] for each in maps)]
    if missing:
        raise UsageError(
            f"vLLM's model has no place for the checkpoint's {missing[0]}, so it would not compute what the trainer "
            "does. Use --engine transformers, or a release of vLLM that has one; or start the swarm from a checkpoint "
            "without it, if the model does not need it."
        )
    return modules, opaque


def _not_reloadable(loaded: dict[str, str], error: str) -> str:
    """`loaded`: why each tensor cannot be written in place. `error`: what the plugin says of one of them."""
    said = error.split()
    name = next((name for name in sorted(loaded) if name in said), min(loaded))
    return (
        f"This vLLM cannot follow the swarm. {name} cannot be written in place ({loaded[name]}), and {error}. Choose "
        "a kernel that leaves weights as they are (for experts, a GPU and --moe-backend triton), or use --engine "
        "transformers."
    )


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
