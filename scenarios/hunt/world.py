"""One run: machines, network and trainer under a virtual clock; faults by schedule; then repair, and everybody must
hold the head.
"""

import gc
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import trio
import trio.testing
from blake3 import blake3

from codec import FileSpec, Layout, TensorSpec, pack, write_checkpoint
from codec.sign import Key
from node.coordinator import coordinator
from node.host import endpoint
from node.member import join
from node.member.finishing import Finishing
from node.member.following import Way
from node.settings.choices import EngineName
from node.settings.config import JoinConfig, SeedConfig
from node.settings.ticket import Ticket
from scenarios.hunt.diary import Diary
from scenarios.hunt.machine import Machine, Tally
from scenarios.hunt.network import HuntNetwork
from scenarios.hunt.oracle import Blocks, Oracle, Violation
from scenarios.hunt.restarts import Restarts
from scenarios.hunt.schedule import SEED, Schedule, node_name
from scenarios.hunt.strikes import Strikes
from scenarios.hunt.trainer import Trainer
from scenarios.hunt.virtual_os import REAL_CLOCK, installed
from swarm.protocol.core.documents import AuthorityTime, Capability, seal
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.runtime import RuntimeLimits

__all__ = ["SETTLE_S", "Result", "run"]

SETTLE_S: Final = 180.0
"""After the faults have ended, everybody holds the head, and the trainer's step is finished, within this time."""
_LOOK_S: Final = 0.25
_TURNS: Final = 50_000
_PATIENCE_S: Final = 30.0
"""Between two steps of the trainer after the faults have ended, where the seed's egress is capped."""
_RETAIN: Final = Tuning.loopback().retain_versions
_CONFIG: Final = b'{"model_type": "hunt"}'
_TENSORS: Final = tuple(TensorSpec(f"layer{number:02}.weight", "BF16", (8 + number, 40)) for number in range(12))
_MEMORY: Final = "/dev/shm"


@dataclass
class Result:
    """What one run found."""

    schedule: Schedule
    violations: list[Violation]
    bugs: list[BaseException]
    tally: Tally
    virtual_s: float
    real_s: float
    newest: VersionId
    used: int
    """Request groups that the trainer has trained on."""
    diary: Diary
    keys: dict[str, bytes]
    """Of the machines, by name."""
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.violations)


def run(schedule: Schedule, enough: Callable[[Diary], bool] = lambda diary: False) -> Result:
    """Run a schedule from beginning to end, or until `enough(diary)`."""
    under = _MEMORY if Path(_MEMORY).is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="hunt-", dir=under))
    try:
        return _World(schedule, folder, enough).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()


def _layout() -> Layout:
    return Layout(_TENSORS, (FileSpec("config.json", len(_CONFIG), blake3(_CONFIG).digest()),))


class _Standstill(trio.abc.Instrument):
    """Notices tasks that run without end while no time passes."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._at_s = 0.0
        self._turns = 0

    def before_io_wait(self, timeout: float) -> None:
        """The tasks that could run have had their turn."""
        now = trio.current_time()
        self._turns = self._turns + 1 if now == self._at_s else 0
        self._at_s = now
        if self._turns == _TURNS:
            self._oracle.violate("time goes on", f"{_TURNS} turns of the event loop at one moment")


class _World:
    def __init__(self, schedule: Schedule, folder: Path, enough: Callable[[Diary], bool]) -> None:
        self.schedule, self._folder, self._enough = schedule, folder, enough
        layout = _layout()
        self._oracle, self._tally = Oracle(layout), Tally()
        self._network = HuntNetwork(schedule.seed)
        self._keys = random.Random(f"keys {schedule.seed}")
        self._ending = False
        """The faults have ended."""
        self._base = folder / "base"
        base = self._write_base(layout)
        self._oracle.roots[VersionId(0, 0)] = self._oracle.begun(base)
        self.trainer = Trainer(self._oracle, schedule.seed, self._may_step)
        key = self._new_key()
        seed = self._machine(SEED, key, partial(self._run_seed, key))
        seed.attend = self.trainer.attend
        self._restarts = Restarts(folder / "restart", self._base, layout, schedule.seed)
        seed.look = self._restarts.of_seed(seed)
        self.machines = {SEED: seed}
        """Those whose owners follow the protocol, but for what a fault makes them do."""
        self._all = dict(self.machines)
        """And those of attackers."""
        self._ticket = self._new_ticket(key)
        for number in range(1, schedule.nodes + 1):
            self.machines[node_name(number)] = self._new_node(node_name(number), "transformers")
        self._strikes = Strikes(
            self.machines, self._network, self.trainer, self._oracle, self._tally, self._new_stranger
        )

    def _new_key(self) -> Key:
        return Key(self._keys.randbytes(32))

    def _write_base(self, layout: Layout) -> Blocks:
        rng = np.random.default_rng(self.schedule.seed)
        tensors = {spec.name: rng.integers(0, 1 << 15, spec.elements, np.uint16) for spec in layout.tensors}
        write_checkpoint(self._base, layout, lambda name: tensors[name], {"config.json": _CONFIG})
        return tuple(
            tensors[block.name][block.start : block.start + block.count]
            for block in map(layout.block, range(layout.n_blocks))
        )

    def _machine(self, name: str, key: Key, main: Any) -> Machine:
        rng = random.Random(f"{name} {self.schedule.seed}")
        return Machine(name, key, self._folder / name, rng, self._oracle, self._tally, main)

    def _new_node(self, name: str, engine: EngineName) -> Machine:
        key, number = self._new_key(), len(self._all)
        machine = self._machine(name, key, partial(self._run_node, name, number, key, engine))
        machine.look = self._restarts.of_node(machine, self._ticket.authority)
        self._all[name] = machine
        return machine

    def _new_stranger(self) -> Machine:
        machine = self._new_node(f"stranger{len(self._all)}", "none")
        machine.disk.settle()
        return machine

    def _new_ticket(self, key: Key) -> Ticket:
        capability = Capability(key.public, self._keys.randbytes(16), AuthorityTime(1e12), 1 << 10, 0)
        return Ticket(key.public, (_address(0),), seal(capability, key), "loopback")

    # ------------------------------------------------------------ processes

    async def _run_seed(self, key: Key) -> None:
        config = SeedConfig(
            home=self.machines[SEED].home, base=self._base, name=SEED, preset="loopback", listen=(_address(0),),
            announce=(_address(0),), egress_copies=self.schedule.egress_copies, key=self._folder / "key", coder="rice",
        )  # fmt: skip
        await coordinator._run_with_key(config, key, trio.TASK_STATUS_IGNORED)

    async def _run_node(self, name: str, number: int, key: Key, engine: EngineName) -> None:
        config = JoinConfig(
            home=self._all[name].home, name=name, listen=(_address(number),), announce=(_address(number),),
            wait_for_seed="24h", replica="ram", engine=engine, device="cpu", region=f"region {number % 2}",
            up_gb_day=self.schedule.up_gb_day,
        )  # fmt: skip
        await join._run_in_swarm(Way(self._ticket), config, key, Finishing(0.0), trio.TASK_STATUS_IGNORED)

    # ------------------------------------------------------------ the run

    def run(self) -> Result:
        """Run all of it."""
        began = REAL_CLOCK()
        clock = trio.testing.MockClock(autojump_threshold=0)
        with self._sizes(), installed(self.schedule.seed, self._network, self._all, self._folder):
            trio.run(self._main, clock=clock, instruments=[_Standstill(self._oracle)])
        oracle = self._oracle
        keys = {name: machine.key.public for name, machine in self.machines.items()}
        return Result(
            self.schedule, oracle.violations, oracle.bugs, self._tally, oracle.now, REAL_CLOCK() - began,
            oracle.newest, len(oracle.used), oracle.diary, keys, self.trainer.status(),
        )  # fmt: skip

    @contextmanager
    def _sizes(self) -> Iterator[None]:
        """Within it versions have chunks of the schedule's size, and as many of them are kept as it says."""
        chunk_bytes, retain = self.schedule.chunk_bytes or pack.MIN_CHUNK_BYTES, self.schedule.retain or _RETAIN
        tuning = replace(Tuning.loopback(), retain_versions=retain)
        with (
            patch.object(pack, "MIN_CHUNK_BYTES", chunk_bytes),
            patch.object(Tuning, "loopback", lambda: tuning),
            patch.object(endpoint, "RuntimeLimits", partial(RuntimeLimits, retain_versions=retain)),
        ):
            yield

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._oracle.stop = nursery.cancel_scope.cancel
            for machine in self.machines.values():
                machine.disk.settle()
                nursery.start_soon(machine.live)
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self._strike)
            await self._until(lambda: self._ending or self._enough(self._oracle.diary))
            if self._ending:
                await self._settle()
            nursery.cancel_scope.cancel()

    async def _keep_time(self) -> None:
        while True:
            self._oracle.now = trio.current_time()
            if not self._lagging():
                self._oracle.diary.whole_s.append((self._oracle.now, self._oracle.newest))
            await trio.sleep(_LOOK_S)

    async def _strike(self) -> None:
        await self._strikes.run(self.schedule)
        self._ending = True

    async def _until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        while not condition():  # noqa: ASYNC110 - it depends on many things, none of which tells it
            await trio.sleep(_LOOK_S)

    async def _may_step(self) -> None:
        """The trainer begins no step after the faults have ended; but where the seed's egress is capped, what the cap
        forbids may wait for the next version's."""
        self.trainer.busy = False
        if self._ending and self.schedule.egress_copies is None:
            await trio.sleep_forever()
        if self._ending:
            await trio.sleep(_PATIENCE_S)
        await trio.lowlevel.checkpoint()

    async def _settle(self) -> None:
        with trio.move_on_after(SETTLE_S) as patience:
            await self._until(self._is_settled)
        if patience.cancelled_caught and self._waits_for_cap():
            self._tally.ends["the swarm waits: the cap on egress refuses what is asked"] += 1
        elif patience.cancelled_caught:
            self._oracle.violate("everybody holds the head", f"after {SETTLE_S:.0f} s: {self._unsettled()}")

    def _waits_for_cap(self) -> bool:
        """The seed may not send what is missing: `--egress-copies` is a hard cap, which is kept even if the swarm must
        wait for the next start of the seed."""
        return self.machines[SEED].refuses()

    def _is_settled(self) -> bool:
        return not self._unsettled()

    def _unsettled(self) -> str:
        """What is missing until the run may end; empty: nothing."""
        honest = self._oracle.suspects.isdisjoint
        works = any(honest({machine.key.public}) for name, machine in self.machines.items() if name != SEED)
        return self._lagging() or ("the trainer's step is not finished" if self.trainer.busy and works else "")

    def _lagging(self) -> str:
        """Who does not hold the newest version; empty: everybody does."""
        newest = self._oracle.newest
        for name, machine in self.machines.items():
            if machine.key.public in self._oracle.banned:
                continue
            held = machine.held() if machine.serving and not machine.dead else None
            if held != newest:
                return f"{name} holds {held} and not {newest}"
            if machine.engine is not None and machine.engine.version != newest:
                return f"the engine of {name} holds {machine.engine.version} and not {newest}"
        return ""


def _address(number: int) -> str:
    return f"/ip4/10.0.0.{number + 1}/tcp/4001"
