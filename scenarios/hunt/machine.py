"""A machine: its disk, its clock, the process that runs on it, and the faults that wait for it.

All tasks of a machine have it in their context (`MACHINE`), so that what the product asks of its operating system is
answered for the right machine. A process ends in one way, as by SIGKILL: from then on it can neither send nor write,
whatever its tasks still do while they are cancelled.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio

from codec.errors import SwarmError
from codec.sign import Key
from node.member.lease_inventory import LeaseInventory
from scenarios.hunt.coverage import Coverage
from scenarios.hunt.disk import VirtualDisk
from scenarios.hunt.engine import HuntEngine
from scenarios.hunt.hostile import Hostility
from scenarios.hunt.oracle import Oracle
from scenarios.hunt.schedule import SEED, Fault, named
from swarm.protocol.core.version import VersionId

__all__ = ["MACHINE", "Killed", "Machine", "Tally"]

MACHINE: ContextVar["Machine"] = ContextVar("MACHINE")
_EPOCH_S: Final = 1_800_000_000.0
"""Unix time at the beginning of a run, s."""
_AGAIN_S: Final = 1.0
"""A process that ended by itself is started again after this, as by a service manager."""
_SPOILED: Final = frozenset({"rot", "lie"})
"""After such faults a home may be beyond repair, and its owner removes it."""
_STARTS: Final = 4
"""Starts in a row that fail before the owner of a spoiled home removes it."""


class Killed(BaseException):
    """The process does not exist any more."""


@dataclass
class Tally:
    """What happened in a run, of all machines together."""

    steps: int = 0
    """Effects of cores, and steps of disks."""
    struck: Counter[str] = field(default_factory=Counter)
    """Faults that struck, by kind."""
    ends: Counter[str] = field(default_factory=Counter)
    """Reasons for which processes ended by themselves."""
    coverage: Coverage = field(default_factory=Coverage)
    moments: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each moment came: (`seed` or `node`, its full name; see `schedule.named`)."""
    looks: int = 0
    """Looks at what a machine would start with (`restarts`)."""


async def _nobody(coordinator: object) -> None:
    await trio.lowlevel.checkpoint()


@dataclass(eq=False)
class Machine:
    """One machine. `main()` is the process that it runs."""

    name: str
    key: Key
    home: Path
    rng: random.Random
    oracle: Oracle
    tally: Tally
    main: Callable[[], Awaitable[None]]
    attend: Callable[[Any], Awaitable[None]] = _nobody
    """Of the seed: the trainer, which is called with the coordinator."""
    disk: VirtualDisk = field(init=False)
    dead: bool = False
    clock_s: float = 0.0
    """What its clock is ahead of the true time."""
    slow_s: float = 0.0
    """The longest time of one operation of its disk."""
    loses: float = 0.0
    repeats: float = 0.0
    """Probability that a message that may be lost, or come twice, does."""
    hostile: Hostility = field(default_factory=Hostility)
    armed: list[list[Any]] = field(default_factory=list)
    """[fault, how many of its effects pass before]: those that wait for an effect."""
    engine: HuntEngine | None = None
    suffered: set[str] = field(default_factory=set)
    """Kinds of the faults of its disk."""
    held: Callable[[], VersionId | None] = lambda: None
    """The version that its process holds, by its core."""
    refuses: Callable[[], bool] = lambda: False
    """Of the seed: whether its cap on egress has refused a request since the newest version was begun."""
    serving: bool = False
    """Whether its process runs."""
    inventory: LeaseInventory | None = None
    """The work leases of its process."""
    unanswered: set[tuple[int, int]] = field(default_factory=set)
    """(lease, sample) of the finished rollouts that its process had when they were looked at last."""
    dropped: set[int] = field(default_factory=set)
    """Leases that its process has dropped, with their rollouts: withdrawn, past their end, or given back."""
    look: Callable[[str], None] = lambda name: None
    """Called before each effect, by name: may look at what its next process would start with (`restarts`)."""
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _power: bool = False
    _down_s: float = 0.0
    _wake: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.disk = VirtualDisk(self.home, self.step)
        self.home.mkdir(mode=0o700)

    @property
    def role(self) -> str:
        return "seed" if self.name == SEED else "node"

    # ------------------------------------------------------------ its operating system

    def unix_s(self) -> float:
        """What its clock shows, s since 1970."""
        return _EPOCH_S + self.oracle.now + self.clock_s

    def step(self, moment: str, name: str = "") -> None:
        """Something happens that others, or a later process, could see. `name`: what it happens to. Raises `Killed`."""
        if self.dead:
            raise Killed
        self.tally.steps += 1
        self.oracle.now = trio.current_time()
        exact = named(moment, name)
        self.tally.moments[self.role, exact] += 1
        for waiting in self.armed:
            fault = waiting[0]
            if fault.when in (moment, exact):
                if waiting[1]:
                    waiting[1] -= 1
                    continue
                self.armed.remove(waiting)
                self.die(fault)
                raise Killed

    async def run_blocking(self, function: Callable[..., Any], *args: Any) -> Any:
        """As a worker thread runs it: some time later, and the result comes some time after that."""
        if self.dead:
            raise Killed
        with trio.CancelScope(shield=True):
            await trio.sleep(self.rng.random() * (self.slow_s or 0.001))
            if self.dead:
                raise Killed
            result = function(*args)
            await trio.sleep(self.rng.random() * 0.001)
            return result

    # ------------------------------------------------------------ life

    @property
    def lost_power(self) -> bool:
        return self.dead and self._power

    def die(self, fault: Fault) -> None:
        """The process ends now; with a fault `power`, the machine loses what was not synced."""
        if self.dead:
            return
        self.tally.struck[fault.kind] += 1
        self.dead, self._power, self._down_s = True, fault.kind == "power", fault.for_s
        self._scope.cancel()

    def stop(self, fault: Fault) -> None:
        """The process is asked to end (SIGTERM), and does what it does then."""
        if not self.dead:
            self._down_s = fault.for_s
            self._scope.cancel()

    def revive(self) -> None:
        """Nothing waits for it any more, and it is started at once if it is down."""
        self.armed.clear()
        self.disk.full = self.disk.lies = False
        self.slow_s = self.loses = self.repeats = 0.0
        self.hostile.end()
        if self.engine is not None:
            self.engine.dies, self.engine.hangs_until = False, 0.0
        self._wake.set()

    async def live(self) -> None:
        """Run the process, and again whenever it ends."""
        MACHINE.set(self)
        failures = 0
        while True:
            began = trio.current_time()
            self.dead, self._power, self._down_s = False, False, _AGAIN_S
            self.inventory = None
            self.hostile.forget()
            self.unanswered.clear()
            self.dropped.clear()
            self._scope = trio.CancelScope()
            why = await self._run_once()
            self.engine, self.serving = None, False
            if self.dead:
                if self._power:
                    self.disk.cut_power(self.rng)
                failures = 0
            else:
                self.dead = True
                self.tally.ends[why] += 1
                self.oracle.noticed(self.key.public)
                failures = failures + 1 if trio.current_time() - began < 10.0 else 1
                if failures >= _STARTS and self.suffered & _SPOILED:
                    self.tally.struck["home removed"] += 1
                    self.disk.clear()
                    failures = 0
            self._wake = trio.Event()
            with trio.move_on_after(self._down_s):
                await self._wake.wait()

    async def _run_once(self) -> str:
        """Why the process ended by itself."""
        found: list[BaseException] = []
        try:
            with self._scope:
                self.serving = True
                await self.main()
        except* Killed:
            pass
        except* Exception as errors:
            found = _leaves(errors)
        if self.dead:
            return ""
        for error in found:
            if not isinstance(error, SwarmError):
                self.oracle.violate("no bug", f"{self.name}: {type(error).__name__}: {error}")
                self.oracle.bugs.append(error)
        return type(found[0]).__name__ + ": " + str(found[0])[:60] if found else "returned"


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
