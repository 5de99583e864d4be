"""A model of an engine that has real bits: it is loaded from the replica, patched by each version, and checked.

It takes the time of an engine and draws meaningless tokens (`ModelledEngine`). It follows versions as `EngineHost` and
an engine's process do together: an engine that dies, or does not answer in a commit, is loaded anew.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

import numpy as np
import trio
from numpy.typing import NDArray

from codec import Layout, read_patch, shared
from node.engines.base import Completion, Prompt, SamplingParams, Version
from node.engines.group import GroupedEngine
from node.engines.host import Commitment, Counts, EngineHost, EngineLost, ReplicaRef
from node.engines.link import Draws
from node.member.engine_runtime import EngineRuntime
from node.member.lease_inventory import LeaseInventory
from node.member.pace import Pace
from node.member.worker import NodeWorker
from scenarios.hunt.oracle import Oracle, root_of_bits
from scenarios.sim.virtual.engine import ModelledEngine
from swarm.protocol.core.version import VersionId

__all__ = ["TOKENS", "HuntEngine", "engine_runtime"]

Changes = list[tuple[str, NDArray[np.int64], NDArray[np.uint16]]]
"""Of a patch: the name of a tensor, positions in it, and their new bits."""

TOKENS: Final = 12
"""Mean length of a completion."""
_TOKENS_S: Final = 6.0
_STAGE_S, _PAUSE_S, _LOAD_S = 0.05, 0.02, 0.5
_COMMIT_WITHIN_S: Final = 60.0
"""As `EngineDeadlines.commit_s`."""
_PACE: Final = Pace(capacity=8, batch=4, self_test_tokens=0)


class HuntEngine(ModelledEngine):
    """What stands in for `EngineHost`: one engine of one node. `lend()` gives the replica to load it from."""

    def __init__(self, lend: Callable[[], Awaitable[ReplicaRef]], oracle: Oracle, where: str, key: bytes) -> None:
        """`where`, `key`: the name and the key of the machine."""
        super().__init__(_TOKENS_S, TOKENS, 0.5, _STAGE_S, _PAUSE_S, b"", version=(0, 0))
        self.ready = False
        self.waits_for = "the replica"
        self.restarts = self.reloads = 0
        self.asleep = False
        self.dies = False
        """The next commit ends the engine's process."""
        self.hangs_until = 0.0
        """Virtual time until which a commit does not return."""
        self._lend, self._oracle, self._where, self._key = lend, oracle, where, key
        self._layout: Layout | None = None
        self._bits: list[NDArray[np.uint16]] = []
        self._staged: tuple[Version, Changes] | None = None
        self._load_again = trio.Event()
        self._is_ready = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the engine, and again whenever it was lost; until cancelled."""
        task_status.started()
        while True:
            await self._load()
            await self._load_again.wait()
            self._load_again = trio.Event()

    async def _load(self) -> None:
        while True:
            ref = await self._lend()
            await trio.sleep(_LOAD_S)
            with memoryview(shared.map_readonly(ref.fd)) as memory:
                specs = [ref.layout.block(number) for number in range(ref.layout.n_blocks)]
                bits = [np.frombuffer(memory[s.offset : s.offset + s.nbytes], np.uint16).copy() for s in specs]
            if root_of_bits(ref.layout, bits) == ref.root:
                break
        self._layout, self._bits, self._staged = ref.layout, bits, None
        self.version, self.root = ref.version, ref.root
        self._applied = [*self._applied[-8:], (ref.version, self._now)]
        self.check()
        self.ready, self.waits_for = True, ""
        await super().wait_ready()
        self._is_ready.set()

    async def wait_ready(self) -> None:
        await self._is_ready.wait()

    async def reload(self) -> None:
        """Load all bits anew. Raises `EngineLost` when it cannot."""
        self.reloads += 1
        self._lose()
        await self._is_ready.wait()

    def _lose(self) -> None:
        self.ready, self.waits_for = False, "the replica"
        self._is_ready = trio.Event()
        self._wake()
        self._load_again.set()

    def check(self) -> None:
        """Check that the bits that tokens are drawn from are those of the version."""
        self._oracle.check_bits(VersionId(*self.version), self._bits, f"the engine of {self._where}")

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Counts | None = None,
        adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[list[Completion], float]:
        """As `EngineHost.generate`; no tokens are told as they are drawn. Raises `EngineLost` when it is lost."""
        if not self.ready:
            raise EngineLost("the engine is not loaded")
        self.check()
        restarts = self.restarts + self.reloads
        found = await super().generate(prompts, sampling, counts, adapter, draws)
        if restarts != self.restarts + self.reloads:
            raise EngineLost("the engine was loaded anew")
        for completion in found[0]:
            versions = [(*span.version,) for span in completion.spans for _ in range(span.start, span.end)]
            self._oracle.drew(self._key, completion.token_ids, tuple(versions))
        return found

    async def stage(self, patch_fd: int, version: Version) -> float:
        if not self.ready:
            raise EngineLost("the engine is not loaded")
        changes = [(name, where.copy(), bits.copy()) for name, where, bits in read_patch(patch_fd)]
        self._staged = version, changes
        return await super().stage(patch_fd, version)

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        if not self.ready:
            raise EngineLost("the engine is not loaded")
        if self.dies or self.hangs_until > trio.current_time():
            if not self.dies:
                await trio.sleep(min(_COMMIT_WITHIN_S, self.hangs_until - trio.current_time()))
            self.dies = False
            self.restarts += 1
            self._oracle.noticed(self._key)
            self._lose()
            raise EngineLost("the engine ended in a commit")
        staged, self._staged = self._staged, None
        if staged is None or staged[0] != version:
            self.reloads += 1
            self._lose()
            raise EngineLost("nothing is staged")
        patched = self._patched(staged[1])
        assert self._layout is not None
        if root_of_bits(self._layout, patched) != root:  # the patch is of another version than the engine has
            await self.reload()
            return None
        done = await super().commit(version, root)
        self._bits = patched  # without a checkpoint since the version was set: nothing is drawn between
        self.check()
        return done

    def _patched(self, changes: Changes) -> list[NDArray[np.uint16]]:
        """The engine's bits with these changes."""
        assert self._layout is not None
        patched = [bits.copy() for bits in self._bits]
        for name, where, bits in changes:
            for number in self._layout.blocks_of(name):
                spec = self._layout.block(number)
                inside = (where >= spec.start) & (where < spec.start + spec.count)
                patched[number][where[inside] - spec.start] = bits[inside]
        return patched

    async def prove(self) -> tuple[bytes, bool]:
        assert self._layout is not None
        root = root_of_bits(self._layout, self._bits)
        return root, root == self.root

    async def prove_adapters(self) -> bool:
        """It has none."""
        await trio.lowlevel.checkpoint()
        return True


def engine_runtime(
    oracle: Oracle,
    where: Callable[[], tuple[str, bytes]],
    made: Callable[[HuntEngine], None],
    working: Callable[[LeaseInventory], None],
) -> type[EngineRuntime]:
    """The product's `EngineRuntime`, with a `HuntEngine` in the place of an `EngineHost`. `where()`: the name
    and key of the machine that makes one; `made` is told of the engine, and `working` of the work leases."""

    class HuntEngineRuntime(EngineRuntime):
        def __init__(self, config, key, store, model, send) -> None:
            super().__init__(config, key, store, model, send)
            self.worker = NodeWorker(key, self.host, self._send, _PACE)
            working(self.worker._inventory)

        async def _planned(self) -> list[GroupedEngine]:
            await trio.lowlevel.checkpoint()
            name, key = where()
            engine = HuntEngine(self._lend_replica, oracle, name, key)
            made(engine)
            return [GroupedEngine(cast(EngineHost, engine))]

    return HuntEngineRuntime
