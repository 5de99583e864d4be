"""What strikes whom and when: a seeded list of faults, which can be stored, replayed, and made smaller. Pure.

A fault names a machine and a virtual time, and often an effect: it strikes at the first such effect after that time.
So faults do not depend on one another, and a list still makes sense when some are taken out of it.

Each run has faults of some kinds only, with weights of its own: a run in which everything happens to everybody spends
its time on repairs and reaches little else ("swarm testing", Groce et al., ISSTA 2012).
"""

import random
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["EXACT", "KINDS", "MOMENTS", "SEED", "Fault", "Schedule", "draw", "named", "node_name"]

SEED: Final = "seed"
"""The name of the trainer's machine."""

MOMENTS: Final = (
    "Persist", "Run", "Send", "SendPiece", "SendBlock", "VersionApplied", "Announce", "Drop", "SetTimer",
    "disk:write", "disk:sync", "disk:rename", "disk:sync_folder", "disk:remove", "disk:commit", "sqlite:sync",
    "sqlite:write",
)  # fmt: skip
"""Effects of a core, steps of the store's disk and of SQLite, at which a process may be killed. The fault's `when`
begins with `before ` or `after `."""

EXACT: Final = {
    "seed": (
        "Send Verdict", "Send WorkLease", "Send Withdraw", "Send Welcome", "Send ManifestNews", "Send HeartbeatNews",
        "Send Refused", "Persist boot", "disk:write N.N.N", "disk:sync N.N.N", "disk:write HASH", "disk:rename HASH",
        "disk:rename N.N", "disk:remove HASH", "disk:remove N.N.N", "disk:write clean.json", "disk:rename clean.json",
        "sqlite:write ledger.sqlite-wal", "sqlite:sync ledger.sqlite-wal", "sqlite:write swarm.sqlite-wal",
        "sqlite:sync swarm.sqlite-wal",
    ),
    "node": (
        "Send SignedRollout", "Send WorkRequest", "Send GiveBack", "Send Hello", "Send Join", "Send Bye",
        "Send Reports", "Send Attach", "Run stage", "Run apply", "Run open", "Run replay", "disk:write N.N.N",
        "disk:sync N.N.N", "disk:write HASH", "disk:rename HASH", "disk:rename N.N", "disk:remove N.N.N",
        "disk:write clean.json", "disk:rename clean.json", "sqlite:write swarm.sqlite-wal",
        "sqlite:sync swarm.sqlite-wal",
    ),
}  # fmt: skip
"""By role: moments by what is sent, run or written (see `named`)."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fault."""

    at_s: float
    """Virtual time from which on it may strike, in seconds."""
    kind: str
    """See `KINDS`."""
    where: str
    """The machine."""
    other: str = ""
    """The other end, of a fault of one path."""
    for_s: float = 0.0
    """How long it lasts; of a kill, how long the machine stays down."""
    when: str = ""
    """The effect at which it strikes (see `MOMENTS` and `EXACT`); empty: at once."""
    skip: int = 0
    """How many such effects pass before."""
    amount: float = 0.0
    """A delay or a clock's jump in seconds, or a probability."""


class Schedule(msgspec.Struct, frozen=True):
    """One run: who takes part, for how long, and what strikes. `seed` decides everything that the faults do not."""

    seed: int
    nodes: int
    seconds: float
    """Virtual seconds during which faults strike; then everything is repaired."""
    faults: tuple[Fault, ...] = ()
    egress_copies: float | None = None
    chunk_bytes: int | None = None
    """The size of a chunk to aim for; None: the product's, which makes one chunk of these small versions."""
    retain: int | None = None
    """For how many versions chunks are kept; None: the product's default, more than most runs have versions."""
    up_gb_day: float | None = None
    """What each node may send a day, in GB; None: any amount. `draw` draws none."""

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Schedule":
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def without(self, gone: set[int]) -> "Schedule":
        """The same without the faults at these positions."""
        kept = tuple(fault for number, fault in enumerate(self.faults) if number not in gone)
        return msgspec.structs.replace(self, faults=kept)


def node_name(number: int) -> str:
    """The name of a node; they are counted from 1."""
    return f"node{number}"


@lru_cache(4096)
def named(moment: str, name: str) -> str:
    """The exact name of a moment at which something happens to `name`, in which numbers are `N` and hashes `HASH`."""
    name = re.sub(r"[0-9]+", "N", re.sub(r"[0-9a-f]{16,}", "HASH", name))
    return f"{moment} {name}".strip()


_Draw = Callable[[random.Random, float, list[str]], Fault]


def _moment(rng: random.Random, where: str) -> str:
    effects = MOMENTS if rng.random() < 0.4 else EXACT["seed" if where == SEED else "node"]
    return f"{rng.choice(('before', 'after'))} {rng.choice(effects)}"


def _kill(kind: str) -> _Draw:
    def drawn(rng: random.Random, at_s: float, names: list[str]) -> Fault:
        where = SEED if rng.random() < _SEED_SHARE else rng.choice(names)
        when = _moment(rng, where) if rng.random() < 0.8 else ""
        down_s = rng.choice((0.1, 0.1, 1.0, 5.0, 20.0))
        return Fault(at_s, kind, where, for_s=down_s, when=when, skip=rng.choice((0, 0, 0, 1, 3, 10, 40)))

    return drawn


def _lasting(kind: str, amounts: tuple[float, ...] = (0.0,), *, node: bool = False, pair: bool = False) -> _Draw:
    """`node`: it never strikes the seed. `pair`: it strikes a path."""

    def drawn(rng: random.Random, at_s: float, names: list[str]) -> Fault:
        where, *others = rng.sample(names[1:] if node else names, 2 if pair else 1)
        for_s = rng.choice((0.5, 2.0, 8.0, 30.0))
        return Fault(at_s, kind, where, *others, for_s=for_s, amount=rng.choice(amounts))

    return drawn


def _trainer(kind: str, phases: tuple[str, ...]) -> _Draw:
    def drawn(rng: random.Random, at_s: float, names: list[str]) -> Fault:
        return Fault(at_s, kind, SEED, for_s=rng.choice((0.0, 1.0, 5.0)), when=rng.choice(phases))

    return drawn


KINDS: Final[dict[str, tuple[float, _Draw]]] = {
    "kill": (4.0, _kill("kill")),
    "power": (3.0, _kill("power")),
    "cut": (1.5, _lasting("cut", pair=True)),
    "silent": (1.5, _lasting("silent", pair=True)),
    "one_way": (1.5, _lasting("one_way", pair=True)),
    "isolate": (1.0, _lasting("isolate")),
    "mute": (1.0, _lasting("mute")),
    "delay": (1.0, _lasting("delay", (0.2, 2.0, 20.0, 90.0))),
    "rebind": (1.0, _lasting("rebind")),
    "lose": (1.0, _lasting("lose", (0.05, 0.3))),
    "repeat": (1.0, _lasting("repeat", (0.1, 0.5))),
    "full": (0.7, _lasting("full")),
    "slow": (1.0, _lasting("slow", (0.05, 0.5, 3.0))),
    "lie": (0.5, _lasting("lie", node=True)),
    "rot": (0.5, _lasting("rot", node=True)),
    "clock": (0.7, _lasting("clock", (-3600.0, -5.0, 5.0, 3600.0, 86_400.0))),
    "engine_dies": (1.0, _lasting("engine_dies", node=True)),
    "engine_hangs": (1.0, _lasting("engine_hangs", node=True)),
    "stop": (0.7, _lasting("stop")),
    "poison": (0.5, _lasting("poison", (0.2, 1.0), node=True)),
    "withhold": (0.5, _lasting("withhold", node=True)),
    "eclipse": (0.5, _lasting("eclipse", node=True)),
    "replay": (0.4, _lasting("replay", (0.05, 0.5), node=True)),
    "false_reports": (0.5, _lasting("false_reports", node=True)),
    "forge": (0.5, _lasting("forge", (0.3, 1.0), node=True)),
    "sybils": (0.3, _lasting("sybils")),
    "trainer_dies": (1.5, _trainer("trainer_dies", ("begin", "add", "end", "sealed", "offer", "got", "used"))),
    "rollback": (0.5, _trainer("rollback", ("",))),
    "rival": (0.3, _trainer("rival", ("",))),
}
"""By name: how often it is drawn, relative to the others, and how.

`kill`: the process ends, at once or at an effect; `power`: the machine too, so that what was not synced is lost, torn
or out of order; `stop`: the process is asked to end. `cut`: connections of a path break and none is made; `silent`:
nothing arrives, and nobody is told; `one_way`: the same in one direction; `isolate`: `silent` on all paths of a
machine; `mute`: `one_way` on all paths of a machine, which still hears the others; `delay`: all that it sends arrives
later; `rebind`: its connections break, as when a NAT forgets them. `lose`, `repeat`: reports, work messages and
announcements.
`full`, `slow`, `lie` (a sync that does nothing), `rot` (a bit of a file changes): its disk. `clock`: its clock jumps.
Hostile nodes, which have a lease and sign with their own keys: `poison`: pieces that they send are wrong; `withhold`:
they send none; `eclipse`: they pass nothing on to other members; `replay`: they send again what they sent before;
`false_reports`: they tell each peer something else of themselves and of their parents; `forge`: they return rollouts of
other leases, samples and versions; `sybils`: three more machines of an attacker join, and eclipse.
`engine_dies`, `engine_hangs`: in a commit. `trainer_dies`: in a phase of its step; `rollback`: the trainer returns to
an older version; `rival`: another trainer comes with its name."""


_SEED_SHARE: Final = 0.2
"""Of the kills, beside its turn among all machines: the seed's loss is what a run may not survive."""
_AGAIN: Final = 0.35
"""Share of the faults of `_LEFT_OPEN` that are followed by the end of the same machine."""
_LEFT_OPEN: Final = frozenset({"kill", "power", "stop", "rot", "lie", "full", "slow", "rollback", "engine_dies"})
"""After these a machine has something to repair or to finish; to be ended meanwhile is another state."""
_WEIGHTS: Final = (0.3, 1.0, 3.0)
"""What a kind's weight is multiplied by in one run."""


def draw(seed: int, nodes: int, seconds: float, every_s: float) -> Schedule:
    """A schedule with about one fault in `every_s` seconds; the same arguments give the same schedule."""
    rng = random.Random(f"schedule {seed}")
    names = [SEED, *map(node_name, range(1, nodes + 1))]
    weights = _weights(rng)
    count = max(1, round(seconds / every_s * rng.choice((0.5, 1.0, 1.5))))
    kinds = rng.choices(list(weights), list(weights.values()), k=count)
    times = sorted(round(rng.uniform(3.0, seconds), 2) for _ in kinds)
    faults: list[Fault] = []
    for kind, at_s in zip(kinds, times, strict=True):
        fault = KINDS[kind][1](rng, at_s, names)
        faults.append(fault)
        if kind in _LEFT_OPEN and rng.random() < _AGAIN:
            faults.append(_ends_soon(rng, fault, seconds))
    faults.sort(key=lambda fault: fault.at_s)
    egress, chunk = rng.choice((None, None, None, 1.1, 2.0)), rng.choice((None, None, None, 150))
    return Schedule(seed, nodes, seconds, tuple(faults), egress, chunk, rng.choice((None, None, 3)))


def _weights(rng: random.Random) -> dict[str, float]:
    """The kinds of faults of one run, with their weights; in one run of four all kinds."""
    if rng.random() < 0.25:
        return {kind: weight for kind, (weight, _) in KINDS.items()}
    chosen = {kind: weight * rng.choice(_WEIGHTS) for kind, (weight, _) in KINDS.items() if rng.random() < 0.5}
    return chosen or {"kill": 1.0}


def _ends_soon(rng: random.Random, first: Fault, seconds: float) -> Fault:
    """A kill of the machine of `first` soon after it, or soon after it is up again; before `seconds`."""
    up_s = first.for_s if first.kind in ("kill", "power", "stop") else 0.0
    kind = rng.choice(("kill", "power"))
    when = _moment(rng, first.where) if rng.random() < 0.5 else ""
    at_s = min(seconds, round(first.at_s + up_s + rng.uniform(0.0, 3.0), 2))
    return Fault(at_s, kind, first.where, for_s=rng.choice((0.1, 1.0)), when=when, skip=rng.choice((0, 0, 1)))
