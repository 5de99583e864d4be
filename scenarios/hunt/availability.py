"""Availability by class of fault: each run has one, and it is measured how soon that was noticed, and when all went on.

    python -m scenarios.hunt.availability --runs 10 [CLASS...]

Times are virtual, with the preset `loopback` and links of 10 ms, so they do not depend on the machine. *Noticed*: from
the fault's beginning until another machine, or the process itself, knew of it. *Recovered*: from the fault's end until
a rollout and a version of after that end were accepted and sealed, and every machine and engine held the newest. A run
without a fault takes most of a step for that too. What was lost is counted by the invariants of the hunt.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from scenarios.hunt.hashes import with_fixed_hashes

if __name__ == "__main__":
    with_fixed_hashes("scenarios.hunt.availability")

from scenarios.hunt.schedule import SEED, Fault, Schedule, node_name
from scenarios.hunt.world import Result, run

__all__ = ["CLASSES", "Measured", "measure"]

_BEFORE_S: Final = 15.0
"""Virtual time before a fault: everybody holds a version and generates."""
_WITHIN_S: Final = 180.0
"""A run that has not recovered this long after its fault's end has failed."""
_NODE: Final = node_name(1)


def _one(kind: str, where: str, for_s: float, **more: str | float) -> Callable[[float], tuple[Fault, ...]]:
    return lambda at_s: (Fault(at_s, kind, where, for_s=for_s, **more),)  # type: ignore[arg-type]


CLASSES: Final[dict[str, Callable[[float], tuple[Fault, ...]]]] = {
    "none": lambda at_s: (),
    "a node's process is killed, and started again after 1 s": _one("kill", _NODE, 1.0),
    "a node's machine loses power for 5 s": _one("power", _NODE, 5.0),
    "the seed's process is killed, and started again after 1 s": _one("kill", SEED, 1.0),
    "the seed's machine loses power for 5 s": _one("power", SEED, 5.0),
    "the trainer is killed in mid-publish, and started again after 1 s": _one("trainer_dies", SEED, 1.0, when="add"),
    "an engine dies in a commit": _one("engine_dies", _NODE, 0.0),
    "an engine hangs in a commit for 8 s": _one("engine_hangs", _NODE, 8.0),
    "nothing comes from or to a node for 8 s": _one("isolate", _NODE, 8.0),
    "nothing comes from or to the seed for 8 s": _one("isolate", SEED, 8.0),
    "nothing comes through between two nodes for 8 s": _one("silent", _NODE, 8.0, other=node_name(2)),
    "a NAT forgets a node's connections": _one("rebind", _NODE, 0.0),
    "a node's disk is full for 8 s": _one("full", _NODE, 8.0),
    "the seed's disk is full for 8 s": _one("full", SEED, 8.0),
    "a bit of a node's home rots, and it is started again": lambda at_s: (
        Fault(at_s, "rot", _NODE), Fault(at_s, "kill", _NODE, for_s=1.0),
    ),
    "a node's clock jumps by an hour": _one("clock", _NODE, 0.0, amount=3600.0),
    "a node sends wrong pieces for 8 s": _one("poison", _NODE, 8.0, amount=1.0),
    "a node sends no content for 8 s": _one("withhold", _NODE, 8.0),
    "a node passes nothing on for 8 s": _one("eclipse", _NODE, 8.0),
    "three machines of an attacker join, and pass nothing on, for 8 s": _one("sybils", _NODE, 8.0),
}  # fmt: skip
"""By what happens: the faults of a run, from when they strike."""


@dataclass(frozen=True)
class Measured:
    """What the runs of one class came to, in virtual seconds."""

    what: str
    noticed_s: list[float]
    """Of the runs in which somebody noticed."""
    recovered_s: list[float]
    runs: int
    violations: list[str]
    """The seeds and invariants of runs that failed, or did not recover."""

    def row(self) -> str:
        """A row of the table in `docs/reliability.md`."""
        noticed, recovered = (_shown(seconds, self.runs) for seconds in (self.noticed_s, self.recovered_s))
        return f"| {self.what} | {noticed} | {recovered} | {'; '.join(self.violations) or 'nothing'} |"


def _shown(seconds: list[float], runs: int) -> str:
    if not seconds:
        return "not noticed"
    rare = f" ({len(seconds)} of {runs})" if len(seconds) < runs else ""
    return f"{statistics.median(seconds):.1f}, {max(seconds):.1f}{rare}"


def measure(what: str, runs: int, first_seed: int = 1) -> Measured:
    """Runs of one class, each with another seed and another moment."""
    noticed: list[float] = []
    recovered: list[float] = []
    violations: list[str] = []
    for seed in range(first_seed, first_seed + runs):
        at_s = round(_BEFORE_S + random.Random(f"availability {seed}").random() * 5.0, 2)
        faults = CLASSES[what](at_s)
        end_s = max((fault.at_s + fault.for_s for fault in faults), default=at_s)
        schedule = Schedule(seed, 3, end_s + _WITHIN_S, faults)
        result = run(schedule, lambda diary, end_s=end_s: diary.whole_after(end_s) is not None)
        if result.failed:
            violations.append(f"seed {seed}: {result.violations[0].name}")
        if (when := _noticed(result, faults, at_s)) is not None:
            noticed.append(when)
        if (when := result.diary.whole_after(end_s)) is not None:
            recovered.append(when)
        else:
            violations.append(f"seed {seed}: not recovered")
    return Measured(what, noticed, recovered, runs, violations)


def _noticed(result: Result, faults: Sequence[Fault], at_s: float) -> float | None:
    return result.diary.noticed_after(at_s, result.keys[faults[0].where]) if faults else None


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 when a run failed."""
    parser = argparse.ArgumentParser(prog="python -m scenarios.hunt.availability", description=__doc__)
    parser.add_argument("classes", nargs="*", help="parts of the names of classes; none: all")
    parser.add_argument("--runs", type=int, default=10, help="of each class")
    options = parser.parse_args(arguments)
    print("| what happens | noticed after, s (median, longest) | recovered after, s | lost |\n|---|---|---|---|")
    failed = False
    for what in CLASSES:
        if not options.classes or any(part in what for part in options.classes):
            measured = measure(what, options.runs)
            print(measured.row(), flush=True)
            failed = failed or bool(measured.violations)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
