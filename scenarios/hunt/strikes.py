"""Faults strike: each kind of `schedule.KINDS`, and how long it lasts."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import trio

from scenarios.hunt.machine import Machine, Tally
from scenarios.hunt.network import HuntNetwork
from scenarios.hunt.oracle import Oracle
from scenarios.hunt.schedule import Fault, Schedule
from scenarios.hunt.trainer import Trainer

__all__ = ["HOSTILE", "Strikes"]

_SYBILS: Final = 3
_SWITCHES: Final[dict[str, tuple[Callable[[Machine], Any], str]]] = {
    "full": (lambda machine: machine.disk, "full"),
    "lie": (lambda machine: machine.disk, "lies"),
    "slow": (lambda machine: machine, "slow_s"),
    "lose": (lambda machine: machine, "loses"),
    "repeat": (lambda machine: machine, "repeats"),
    "poison": (lambda machine: machine.hostile, "poisons"),
    "withhold": (lambda machine: machine.hostile, "withholds"),
    "eclipse": (lambda machine: machine.hostile, "eclipses"),
    "replay": (lambda machine: machine.hostile, "replays"),
    "false_reports": (lambda machine: machine.hostile, "falsifies"),
    "forge": (lambda machine: machine.hostile, "forges"),
}
"""Faults that last: whose attribute they set, to their amount if they have one, and reset when they end."""
HOSTILE: Final = frozenset({"poison", "withhold", "eclipse", "replay", "false_reports", "forge"})
"""Of these: the node sends what it should not."""
_PATHS: Final = frozenset({"cut", "silent", "one_way", "isolate", "mute", "delay", "rebind"})


class Strikes:
    """The faults of one run."""

    def __init__(
        self,
        machines: Mapping[str, Machine],
        network: HuntNetwork,
        trainer: Trainer,
        oracle: Oracle,
        tally: Tally,
        stranger: Callable[[], Machine],
    ) -> None:
        """`stranger()` makes another machine, whose process joins the swarm as a node without an engine."""
        self._machines, self._network, self._trainer = machines, network, trainer
        self._oracle, self._tally, self._stranger = oracle, tally, stranger

    async def run(self, schedule: Schedule) -> None:
        """All of them, each at its time. When the last one's time is over, all that lasts is ended."""
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for fault in schedule.faults:
                await trio.sleep_until(began_s + fault.at_s)
                self._strike(fault, nursery)
            await trio.sleep_until(began_s + schedule.seconds)
            nursery.cancel_scope.cancel()
        self._network.repair()
        self._trainer.dies.clear()
        for machine in self._machines.values():
            machine.revive()

    def _strike(self, fault: Fault, nursery: trio.Nursery) -> None:
        machine = self._machines.get(fault.where)
        if machine is None:
            return
        if fault.kind in ("kill", "power"):
            if fault.when:
                machine.armed.append([fault, fault.skip])
            else:
                machine.die(fault)
            return
        self._tally.struck[fault.kind] += 1
        if fault.kind in _SWITCHES:
            nursery.start_soon(self._switch, fault, machine)
        elif fault.kind in _PATHS:
            self._strike_path(fault, machine, nursery)
        elif fault.kind == "trainer_dies":
            self._trainer.dies[fault.when] = fault.for_s
        elif fault.kind == "rollback":
            self._trainer.rolls_back = True
        elif fault.kind == "rival":
            self._trainer.has_rival = True
        elif fault.kind == "sybils":
            for _ in range(_SYBILS):
                nursery.start_soon(self._sybil, fault)
        else:
            self._strike_machine(fault, machine)

    async def _switch(self, fault: Fault, machine: Machine) -> None:
        find, name = _SWITCHES[fault.kind]
        if fault.kind in HOSTILE:
            self._oracle.suspects.add(machine.key.public)
        if fault.kind == "lie":
            machine.suffered.add("lie")
        target = find(machine)
        usual = type(getattr(target, name))()
        setattr(target, name, fault.amount or True)
        await trio.sleep(fault.for_s)
        setattr(target, name, usual)

    def _strike_machine(self, fault: Fault, machine: Machine) -> None:
        match fault.kind:
            case "clock":
                machine.clock_s += fault.amount
            case "stop":
                machine.stop(fault)
            case "rot":
                self._oracle.suspects.add(machine.key.public)
                machine.suffered.add("rot")
                machine.disk.rot(machine.rng)
            case "engine_dies" if machine.engine is not None:
                machine.engine.dies = True
            case "engine_hangs" if machine.engine is not None:
                machine.engine.hangs_until = trio.current_time() + fault.for_s

    async def _sybil(self, fault: Fault) -> None:
        """A machine of an attacker joins, is given children by the plan, and passes nothing on to them."""
        machine = self._stranger()
        self._oracle.suspects.add(machine.key.public)
        machine.hostile.eclipses = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(machine.live)
                await trio.sleep(fault.for_s)
                nursery.cancel_scope.cancel()
        finally:
            machine.dead = True

    # ------------------------------------------------------------ paths

    def _strike_path(self, fault: Fault, machine: Machine, nursery: trio.Nursery) -> None:
        network, own, until_s = self._network, machine.key.public, trio.current_time() + fault.for_s
        other = self._machines.get(fault.other)
        peers = [other] if other is not None else [each for each in self._machines.values() if each is not machine]
        match fault.kind:
            case "rebind":
                network.rebind(own)
            case "delay":
                network.delay(own, until_s, fault.amount)
            case "cut":
                for peer in peers:
                    network.cut(own, peer.key.public)
                    nursery.start_soon(self._heal, own, peer.key.public, until_s)
            case _:
                for peer in peers:
                    network.silence(own, peer.key.public, until_s)
                    if fault.kind not in ("one_way", "mute"):
                        network.silence(peer.key.public, own, until_s)

    async def _heal(self, a: bytes, b: bytes, at_s: float) -> None:
        await trio.sleep_until(at_s)
        self._network.heal(a, b)
