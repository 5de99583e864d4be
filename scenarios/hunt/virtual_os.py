"""What the product asks of its operating system, answered for the machine that asks: in-memory patches for one run.

time, threads, secrets     of the machine in whose context the caller runs; a function for a worker thread is called on
                           the event loop, after a while
os.fsync, SQLite           note what is durable
sockets                    `HuntTransport`, `HuntGossip`
engines                    `HuntEngine`

Everything else is the product's own code, down to the assembly of a process (`node.coordinator.coordinator`,
`node.member.join`).
"""

import inspect
import logging
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import structlog
import trio

from codec.bits import DTYPES
from codec.staging import warm_up
from node.coordinator import coordinator
from node.host import endpoint, kernels
from node.host.daily import Daily
from node.ledger.rules import Ledger
from node.ledger.state import LiveLease
from node.member import engine_runtime as engines
from node.member import join
from node.member.lease_inventory import LeaseInventory
from scenarios.hunt import sqlite_files
from scenarios.hunt.disk import FaultyDisk
from scenarios.hunt.engine import HuntEngine, engine_runtime
from scenarios.hunt.machine import MACHINE, Killed, Machine
from scenarios.hunt.network import HuntGossip, HuntNetwork, HuntTransport
from scenarios.hunt.observed import HuntCoordinator, HuntRuntime
from scenarios.sim.virtual.trio_time import one_order
from swarm.store import ChunkStore, Store

__all__ = ["REAL_CLOCK", "installed"]

REAL_CLOCK: Final = time.perf_counter
_ROOMS: Final = ("swarm.", "node.", "codec.")


class _Watcher:
    """What SQLite does with the files of the machines."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self._machines = machines

    def _of(self, path: Path) -> Machine | None:
        return next((each for each in self._machines.values() if each.disk.holds(path)), None)

    def refuses(self, what: str, path: Path) -> str:
        machine = self._of(path)
        if machine is None:
            return ""
        if machine.dead:
            return "gone"
        if what == "open":
            return ""
        try:
            machine.step(f"before sqlite:{'sync' if what == 'sync' else 'write'}", path.name)
        except Killed:
            return "gone"
        return "full" if machine.disk.full and what == "write" else ""

    def synced(self, path: Path) -> None:
        if (machine := self._of(path)) is not None:
            machine.disk.synced_database(path)
            try:
                machine.step("after sqlite:sync", path.name)
            except Killed:
                return

    def fsync(self, descriptor: int) -> None:
        """Stands in for `os.fsync`."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        machine = self._of(path)
        if machine is None or not path.exists():
            return
        if machine.dead:
            raise Killed
        machine.disk.synced(path)
        machine.step("after disk:sync_folder" if path.is_dir() else "after disk:sync", path.name)


async def _run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Stands in for `trio.to_thread.run_sync`."""
    await trio.lowlevel.checkpoint()
    return await MACHINE.get().run_blocking(function, *args)


def _transport(network: HuntNetwork) -> Callable[..., HuntTransport]:
    def made(key: Any, listen: Any, announce: Any, **options: Any) -> HuntTransport:
        found, machine = HuntTransport(network, key, listen, announce), MACHINE.get()
        found.lost_power = lambda: machine.lost_power
        return found

    return made


def _gossip(transport: Any, topic: str, validate: Callable[[bytes], bool]) -> HuntGossip:
    found, machine = HuntGossip(transport, topic, validate), MACHINE.get()
    found.loses = lambda: machine.dead or (machine.loses > 0 and machine.rng.random() < machine.loses)
    return found


def _store(folder: Path, authority: bytes, *, checkpoints_kept: int = 1) -> Store:
    return Store(folder, authority, FaultyDisk(MACHINE.get().disk), checkpoints_kept=checkpoints_kept)


def _here() -> tuple[str, bytes]:
    machine = MACHINE.get()
    return machine.name, machine.key.public


def _made(engine: HuntEngine) -> None:
    MACHINE.get().engine = engine


def _working(inventory: LeaseInventory) -> None:
    MACHINE.get().inventory = inventory


def _drop(usual: Callable[..., bool]) -> Callable[..., bool]:
    def drop(inventory: LeaseInventory, lease: int) -> bool:
        machine = MACHINE.get(None)
        if machine is not None:
            machine.dropped.add(lease)
        return usual(inventory, lease)

    return drop


def _tick(usual: Callable[..., None]) -> Callable[..., None]:
    def tick(ledger: Ledger, now: float) -> None:
        usual(ledger, now)
        machine = MACHINE.get(None)
        late = [lease.id for lease in ledger.leases.values() if lease.deadline <= now]
        if machine is not None:
            machine.oracle.check("no lease past its end", not late, f"the work leases {late} are not ended")
            machine.oracle.check_samples(ledger)

    return tick


def _accept(usual: Callable[..., None]) -> Callable[..., None]:
    def accept(ledger: Ledger, lease: LiveLease, rollout: Any, sealed: bytes, now: float) -> None:
        usual(ledger, lease, rollout, sealed, now)
        done = ledger.groups[lease.group].done.get(rollout.sample)
        if done is not None:
            MACHINE.get().oracle.accepted(ledger, lease, done, rollout.sample, now)

    return accept


def _piece(usual: Callable[..., Any]) -> Callable[..., Any]:
    def piece(chunks: ChunkStore, key: Any, index: int) -> Any:
        data, machine = usual(chunks, key, index), MACHINE.get(None)
        if data is None or machine is None or machine.rng.random() >= machine.hostile.poisons:
            return data
        return bytes([data[0] ^ 1]) + bytes(data[1:])

    return piece


async def _loaded(dtypes: Any = ()) -> bool:
    """Stands in for `kernels.warm_up`, which may start a process."""
    await trio.lowlevel.checkpoint()
    return True


@contextmanager
def installed(seed: int, network: HuntNetwork, machines: Mapping[str, Machine], scratch: Path) -> Iterator[None]:
    """Within it the product's code runs on these machines. `seed` decides all that is random."""
    watcher = _Watcher(machines)
    oracle = next(iter(machines.values())).oracle
    rng = random.Random(f"secrets {seed}")

    def unix_s() -> float:
        machine = MACHINE.get(None)
        return REAL_CLOCK() if machine is None else machine.unix_s()

    def now_s() -> float:
        return oracle.now

    replaced: list[tuple[Any, str, Any]] = [
        (time, "time", unix_s),
        (time, "time_ns", lambda: int(unix_s() * 1e9)),
        (time, "perf_counter", now_s),
        (time, "monotonic", now_s),
        (os, "fsync", watcher.fsync),
        (Daily.__init__, "__defaults__", (unix_s,)),
        (secrets, "token_bytes", lambda size=32: rng.randbytes(size)),
        (secrets, "randbits", rng.getrandbits),
        (endpoint, "Libp2pTransport", _transport(network)),
        (endpoint, "Gossip", _gossip),
        (endpoint, "Store", _store),
        (endpoint, "Runtime", HuntRuntime),
        (coordinator, "Coordinator", HuntCoordinator),
        (
            engines,
            "EngineRuntime",
            engine_runtime(oracle, _here, _made, _working),
        ),
        (Ledger, "_accept", _accept(Ledger._accept)),
        (Ledger, "tick", _tick(Ledger.tick)),
        (LeaseInventory, "drop", _drop(LeaseInventory.drop)),
        (ChunkStore, "piece", _piece(ChunkStore.piece)),
        (kernels, "warm_up", _loaded),
        (coordinator, "_log", _SILENT),
        (join, "_log", _SILENT),
    ]
    warm_up(DTYPES["BF16"])
    random.seed(f"module {seed}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    with ExitStack() as stack:
        stack.enter_context(sqlite_files.installed(watcher, scratch))
        for target, name, new in replaced:
            stack.enter_context(patch.object(target, name, new))
        stack.enter_context(_threads_replaced())
        stack.enter_context(one_order(seed))
        stack.enter_context(patch.dict(os.environ, {"SWARM_STRICT": "1"}))
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


class _Silent:
    """A log that nobody reads."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **fields: None


_SILENT: Final = _Silent()


@contextmanager
def _threads_replaced() -> Iterator[None]:
    """Replace `trio.to_thread.run_sync` wherever the product has it: in modules, and as a default of a parameter."""
    usual = trio.to_thread.run_sync
    undo: list[Callable[[], None]] = []
    for target in [trio.to_thread, *(module for name, module in list(sys.modules.items()) if name.startswith(_ROOMS))]:
        for name, value in list(vars(target).items()):
            if value is usual:
                setattr(target, name, _run_sync)
                undo.append(lambda target=target, name=name: setattr(target, name, usual))
            for function in _functions(value, target.__name__):
                undo += _default_replaced(function, usual)
    try:
        yield
    finally:
        for action in undo:
            action()


def _functions(value: Any, module: str) -> list[Any]:
    """The functions that a name of `module` stands for."""
    if inspect.isclass(value) and value.__module__ == module:
        found = [getattr(each, "__func__", each) for each in vars(value).values()]
        return [each for each in found if inspect.isfunction(each)]
    return [value] if inspect.isfunction(value) and value.__module__ == module else []


def _default_replaced(function: Any, usual: Any) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    if any(each is usual for each in function.__defaults__ or ()):
        before = function.__defaults__
        function.__defaults__ = tuple(_run_sync if each is usual else each for each in before)
        undo.append(lambda: setattr(function, "__defaults__", before))
    for name, value in (function.__kwdefaults__ or {}).items():
        if value is usual:
            function.__kwdefaults__[name] = _run_sync
            undo.append(lambda name=name: function.__kwdefaults__.__setitem__(name, usual))
    return undo
