"""The command line of `python -m scenarios.hunt`: runs one schedule after another until one fails, or time, steps or
runs are used up. A schedule that fails is made small and written to a file.

With `--go-on` it goes on after a failure, and writes each failed schedule to a folder.
"""

import argparse
import json
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from scenarios.hunt.coverage import Coverage
from scenarios.hunt.guide import Guide
from scenarios.hunt.schedule import Schedule, draw
from scenarios.hunt.shrink import shrunk
from scenarios.hunt.virtual_os import REAL_CLOCK
from scenarios.hunt.world import Result, run

__all__ = ["made_small", "main"]


@dataclass
class _Total:
    """What all runs together did."""

    began_s: float = field(default_factory=REAL_CLOCK)
    runs: int = 0
    steps: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)
    moments: Counter[tuple[str, str]] = field(default_factory=Counter)
    looks: int = 0
    failed: list[Result] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return REAL_CLOCK() - self.began_s

    def add(self, result: Result) -> None:
        self.runs += 1
        self.steps += result.tally.steps
        self.struck += result.tally.struck
        self.coverage.add(result.tally.coverage)
        self.moments += result.tally.moments
        self.looks += result.tally.looks
        self.failed += [result] if result.failed else []

    def report(self) -> dict[str, Any]:
        violations = [violation for result in self.failed for violation in result.violations]
        return {
            "runs": self.runs,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "faults": dict(sorted(self.struck.items())),
            "coverage": self.coverage.report(),
            "moments": {f"{role}: {name}": count for (role, name), count in sorted(self.moments.items())},
            "starts_looked_at": self.looks,
            "seeds": [result.schedule.seed for result in self.failed],
            "violations": [[each.name, each.text, each.at_s] for each in violations],
        }


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 when a run failed."""
    options = _parser().parse_args(arguments)
    total, guide = _Total(), Guide(partial(_drawn, options), options.seed)
    while True:
        schedule, crossed = guide.next()
        if options.schedule is not None:
            schedule, crossed = Schedule.read(options.schedule), None
        result = run(schedule)
        total.add(result)
        new = 0 if result.failed else guide.learn(schedule, result.tally.coverage)
        if not options.json:
            _print(result, crossed, new)
        if result.failed:
            _keep(options, result)
        if (result.failed and options.go_on is None) or options.schedule is not None or _enough(options, total):
            break
    print(json.dumps(total.report(), indent=1) if options.json else _summary(total))
    return 1 if total.failed else 0


def _drawn(options: argparse.Namespace, seed: int) -> Schedule:
    """The schedule of a seed, for these flags."""
    schedule = draw(seed, options.nodes, options.virtual, options.every)
    given = {name: getattr(options, name) for name in ("chunk_bytes", "up_gb_day")}
    return replace(schedule, **{name: value for name, value in given.items() if value is not None})


def _keep(options: argparse.Namespace, failed: Result) -> None:
    """Write the schedule of a failed run, where that was asked for."""
    if options.go_on is not None:
        options.go_on.mkdir(parents=True, exist_ok=True)
        failed.schedule.write(options.go_on / f"{failed.schedule.seed}.json")
    if options.keep is None:
        return
    small = failed.schedule if options.whole else made_small(failed)
    small.write(options.keep)
    if not options.json:
        print(f"  {len(small.faults)} faults in {small.seconds:.0f} s, {small.nodes} nodes: {options.keep}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scenarios.hunt", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further run has the next one")
    parser.add_argument("--runs", type=int, default=0, help="end after this many runs")
    parser.add_argument("--steps", type=int, default=0, help="end after this many steps, of all runs together")
    parser.add_argument("--time", type=float, default=0.0, help="end after this many seconds")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--virtual", type=float, default=60.0, help="seconds of virtual time in which faults strike")
    parser.add_argument("--every", type=float, default=2.0, help="mean virtual seconds from one fault to the next")
    parser.add_argument("--chunk-bytes", type=int, help="size of a chunk to aim for; 150 gives versions of about five")
    parser.add_argument("--up-gb-day", type=float, help="daily limit of each node; .00005 is used up in most runs")
    parser.add_argument("--schedule", type=Path, help="run this schedule instead")
    parser.add_argument("--keep", type=Path, help="write the schedule of a failed run to this file, made small")
    parser.add_argument("--go-on", type=Path, help="go on after a failed run; write its schedule to this folder")
    parser.add_argument("--whole", action="store_true", help="do not make it small")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _enough(options: argparse.Namespace, total: _Total) -> bool:
    if not (options.runs or options.steps or options.time):
        return True
    return bool(
        (options.runs and total.runs >= options.runs)
        or (options.steps and total.steps >= options.steps)
        or (options.time and total.seconds >= options.time)
    )


def made_small(failed: Result) -> Schedule:
    """A small schedule that violates the same invariant."""
    name = failed.violations[0].name

    def fails(schedule: Schedule) -> bool:
        return any(violation.name == name for violation in run(schedule).violations)

    return shrunk(failed.schedule, fails)


def _summary(total: _Total) -> str:
    lines = [
        f"{total.runs} runs, {total.steps} steps, {total.struck.total()} faults, {total.looks} starts looked at,"
        f" {len(total.failed)} runs failed, in {total.seconds:.0f} s"
    ]
    for role, found in total.coverage.report().items():
        lines.append(
            f"{role}: {found['pairs']} of {found['of']} pairs of state and event; never: "
            f"{', '.join(found['events_never']) or 'no event'}; {len(found['states_never'])} states"
        )
    return "\n".join(lines)


def _print(result: Result, crossed: int | None, new: int) -> None:
    whose = f"seed {result.schedule.seed}" + ("" if crossed is None else f" crossed with {crossed}")
    print(
        f"{whose}: {result.tally.steps} steps, {result.virtual_s:.0f} virtual s in"
        f" {result.real_s:.1f} s, newest {result.newest}, {result.used} groups used,"
        f" {result.tally.struck.total()} faults, {dict(result.tally.ends)}, {result.trainer},"
        f" {new} new pairs",
        flush=True,
    )
    for violation in result.violations[:5]:
        print(f"  VIOLATED {violation.name} at {violation.at_s:.2f} s: {violation.text}")
    for bug in result.bugs[:1]:
        traceback.print_exception(bug)
