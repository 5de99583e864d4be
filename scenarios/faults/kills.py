"""SIGKILL of anyone at random instants of a real run: all come to hold the next version, and each rollout counts once.

    python -m scenarios.faults.kills --instants 200              half an hour of two cores
    python -m scenarios.faults.kills --instants 20 --seed 7
    python -m scenarios.faults.kills --only seed trainer --folder /tmp/kept

One seed, one trainer and five nodes run all the time: `a`, `b` and `c` have engines (their replicas are in memory, on
disk, and in the engine's memory), `d` and `e` have none. Killed may be any of these processes, the process of an
engine, and that of a node's rewards (a worker). In each round the trainer publishes a version; somebody is killed at a
random instant of the round, and started again by the same command within half a second; one in four is killed once more
while it starts. Engines and workers are started by their nodes.

A round is over when the seed and all nodes hold the version that was published, their engines prove its bits, and the
trainer was handed a group after the last kill. All roots are compared with the one that this process computes. Every
group comes with all of its samples, a sample is in one group only, a group that is handed over again has the same
samples, and the seed's book loses and replaces no rollout that it accepted. (*discarded*: samples of which the author
could not compute the reward, and two other nodes could; the ledger has them generated again, as it is told to.)

*phase*: where the version was just before the kill, by the status of seed and nodes. encoding: not sealed. spreading:
sealed, and a node lacks it. committing: an engine lacks it. generating: everybody has it. starting: the process was
still starting after the kill before. *recovery*: seconds from the last kill of a round until the round is over.

After a failure the folder with all logs stays, and is named with the seed. Exits with 1 then.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.faults.long_run import Actor, LongRun, Member, long_run
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["MEMBERS", "Instant", "main", "strike_all"]

MEMBERS: Final = (
    Member("a", "ram", engine=True),
    Member("b", "disk", engine=True),
    Member("c", "engine", engine=True),
    Member("d", "ram"),
    Member("e", "disk"),
)
UP_MBIT: Final = 10.0
"""Of each process: a version then takes some tenths of a second, so that kills fall into each of its phases."""
LATEST_S: Final = 1.0
"""A kill comes at most this long after the trainer was told to publish."""
RESTART_S: Final = 0.5
"""A killed process is started again within this time."""
TWICE: Final = 0.25
"""Share of the rounds in which the process is killed again while it starts."""
STARTS_S: Final = 3.0
"""The second kill of a round comes at most this long after the start."""
KINDS: Final = ("seed", "trainer", "node", "engine", "worker")
STARTED: Final = ("seed", "trainer", "node")
"""What this program starts again."""
PHASES: Final = ("encoding", "spreading", "committing", "generating", "starting")


@dataclass
class Instant:
    """One kill. `at_s`: seconds after the trainer was told to publish, or (starting) after the start. `recovery_s`: of
    the round; None: another kill of the round came later."""

    number: int
    actor: str
    kind: str
    phase: str
    step: int
    at_s: float
    recovery_s: float | None = None


def phase_of(run: LongRun) -> str:
    """Where the newest version is now."""
    if not run.is_head():
        return "encoding"
    if not all(map(run.replica_holds, run.up)):
        return "spreading"
    return "generating" if run.all_hold() else "committing"


def strike_all(run: LongRun, instants: int, seed: int, only: Sequence[str], found: list[Instant]) -> None:
    """Kill `instants` times, and append each kill to `found`. `only`: kinds of actors; empty: all.

    Raises `UsageError` (`ProcessFailed`, `Miscounted`) when something is not as it must be.
    """
    rng = random.Random(seed)
    while len(found) < instants:
        kind = rng.choice(only or KINDS)
        actor = _chosen(rng, run, kind)
        run.publish()
        began = time.monotonic()
        _sleep_until(began + rng.uniform(0.0, LATEST_S))
        _strike(run, actor, phase_of(run), began, found)
        if actor.kind in STARTED and rng.random() < TWICE and len(found) < instants:
            time.sleep(rng.uniform(0.0, RESTART_S))
            run.start(actor)
            began = time.monotonic()
            _sleep_until(began + rng.uniform(0.0, STARTS_S))
            _strike(run, actor, "starting", began, found)
        killed_at, killed_wall = time.monotonic(), time.time()
        if actor.kind == "engine":
            _until_runs(run, actor)
        if actor.kind in STARTED:
            time.sleep(rng.uniform(0.0, RESTART_S))
            run.start(actor)
        _recover(run, actor, killed_wall)
        found[-1].recovery_s = time.monotonic() - killed_at
        _tell(found[-1], instants, run)


def _chosen(rng: random.Random, run: LongRun, kind: str) -> Actor:
    """An actor of this kind. Of the workers, one that runs, if any does: a node starts none before it has work, and
    faster nodes may take all of these small rounds."""
    actors = [actor for actor in run.actors if actor.kind == kind]
    running = [actor for actor in actors if kind == "worker" and run.pid(actor) is not None]
    return rng.choice(running or actors)


def _strike(run: LongRun, actor: Actor, phase: str, began: float, found: list[Instant]) -> None:
    """Kill the actor; an engine or worker that is not there yet is waited for first."""
    _until_runs(run, actor)
    at_s = time.monotonic() - began
    run.kill(actor)
    found.append(Instant(len(found) + 1, str(actor), actor.kind, phase, run.model.step, at_s))


def _until_runs(run: LongRun, actor: Actor) -> None:
    run.until(f"{actor} runs", lambda: run.pid(actor) is not None)


def _recover(run: LongRun, actor: Actor, killed_wall: float) -> None:
    """Wait until the newest version is everywhere, and rollouts come again; then check all that must be true."""
    if actor.kind == "trainer":
        run.until("the seed answers", lambda: run.swarm.status())
        run.publish_again()
    run.until("everybody holds the version", run.all_hold)
    run.until("rollouts come", lambda: run.counting.last_at > killed_wall)
    run.prove()
    run.look()
    run.counting.compare_book()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _tell(instant: Instant, instants: int, run: LongRun) -> None:
    print(
        f"{instant.number}/{instants}  step {instant.step}  {instant.actor} killed while {instant.phase}, "
        f"recovered after {instant.recovery_s:.1f} s; {run.counting.groups} groups",
        file=sys.stderr, flush=True,
    )  # fmt: skip


# ------------------------------------------------------------ report


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(seconds)
    if not ordered:
        return {"median_s": None, "p95_s": None, "most_s": None}
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    return {"median_s": statistics.median(ordered), "p95_s": p95, "most_s": ordered[-1]}


def rows_of(found: Sequence[Instant]) -> list[dict[str, Any]]:
    """A row for each kind of actor, and one for all: kills by phase, and the spread of the recoveries."""
    rows = []
    for kind in [*dict.fromkeys(instant.kind for instant in found), "all"]:
        own = [instant for instant in found if kind in ("all", instant.kind)]
        phases = {phase: sum(instant.phase == phase for instant in own) for phase in PHASES}
        seconds = [instant.recovery_s for instant in own if instant.recovery_s is not None]
        rows.append({"kind": kind, "kills": len(own)} | phases | _spread(seconds))
    return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    print("  ".join(f"{name.removesuffix('_s'):>10}" for name in rows[0]))
    for row in rows:
        cells = [
            "" if cell is None else f"{cell:.1f} s" if isinstance(cell, float) else str(cell) for cell in row.values()
        ]
        print("  ".join(f"{cell:>10}" for cell in cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--instants", type=int, default=200, help="how many kills (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the actors and instants (default 0)")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=KINDS,
        help="kill only these kinds of processes",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="keep everything in this new folder; default: a temporary one")
    options = parser.parse_args(arguments)
    if options.instants < 1:
        parser.error("--instants: at least 1")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    found: list[Instant] = []
    began, failed, counted = time.monotonic(), "", {}
    try:
        with long_run(folder, MEMBERS, seed=options.seed, up_mbit=UP_MBIT) as run:
            began = time.monotonic()
            strike_all(run, options.instants, options.seed, options.only, found)
            counting = run.counting
            counted = {"groups": counting.groups, "samples": counting.samples, "discarded": counting.discarded}
            counted["versions"] = run.model.step
    except UsageError as error:
        failed = str(error)
    return _report(options, folder, found, failed, counted | {"seconds": time.monotonic() - began})


def _report(
    options: argparse.Namespace, folder: Path, found: list[Instant], failed: str, counted: dict[str, float]
) -> int:
    """Print what was found; returns the exit status."""
    if options.json:
        instants = [asdict(instant) for instant in found]
        report = {"scenario": "kills", "seed": options.seed, "failed": failed, **counted, "instants": instants}
        print(json.dumps(report | {"rows": rows_of(found) if found else []}, indent=1))
    elif found:
        print_rows(rows_of(found))
        print(", ".join(f"{name} {value:,.0f}" for name, value in counted.items()))
    if failed:
        more = f" --only {' '.join(options.only)}" if options.only else ""
        again = f"python -m scenarios.faults.kills --seed {options.seed} --instants {options.instants}{more}"
        print(f"{failed}\nkills: failed at kill {len(found)}; logs: {folder}; again: {again}", file=sys.stderr)
    elif options.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    run_as_program(main)
