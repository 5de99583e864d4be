"""Thousands of versions by real processes while nodes come and go and disks fill; what they use must stay flat.

    python -m scenarios.faults.soak                              2,000 versions, about an hour of two cores
    python -m scenarios.faults.soak --versions 200 --seed 3
    python -m scenarios.faults.soak --versions 60 --a-minute 0.5 --no-full-disk

A seed, a trainer that publishes and takes rollouts all the time, and ten nodes, three of them with engines. Of all
nodes but three, a share `--a-minute` (a tenth) goes each minute: in turn by SIGTERM and by SIGKILL; it is started again
after ten seconds. Minutes and seconds are here the versions that they have room for, one each `--every-s`: where a busy
machine takes longer for some versions, no more nodes go during these, so that the quarters can be compared. The nodes
`steady` and `rest`, the seed and the trainer run from the first to the last version: these are measured, with their
engine. At a third of the versions the disk of the node `disk` fills up, and is freed after twenty; at two thirds the
seed's. Who ends because of that is started again once there is room.

Each version is waited for at the seed, and every twenty versions until everybody holds the newest one.

The table has the means of the first and the last quarter of the samples, which are taken every few seconds from version
20 on: by then a process has what it keeps of the last 16 versions. *memory*: resident. *connections*: TCP sockets, of
which there may be two to each peer. *descriptors*: all others. *disk*: of the home, without the ledger's book. *log a
version*: bytes, of five versions each; the seed's as if all nodes had been there, since it logs nothing of one that is
away. *book*: the ledger's file; it keeps the last 20,000 groups that were taken, so it grows until there are as many,
and is not judged.

Exits with 1 if a quantity grew by more than 5 % (and by more than 1 MiB, two descriptors, 24 connections or 64 bytes),
a rollout was lost or counted twice, a version did not come to all in time, or a log has a traceback. The logs stay
then.
"""

import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.faults.long_run import Actor, LongRun, Member, long_run
from scenarios.faults.small_disk import SmallDisk, in_own_namespace
from scenarios.faults.usage_table import UsageTable, folder_bytes
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.processes import ProcessFailed

__all__ = ["MEMBERS", "Soak", "main"]

MEMBERS: Final = (
    Member("steady", "ram", engine=True),
    Member("rest", "disk"),
    Member("disk", "disk"),
    Member("b", "disk", engine=True),
    Member("c", "engine", engine=True),
    *(Member(name, "ram") for name in "defgh"),
)
LOOKED_AT: Final = ("seed", "steady", "rest")
"""Processes whose homes and logs are measured."""
STAY: Final = ("steady", "rest", "disk")
"""Nodes that churn leaves alone."""
UP_MBIT: Final = 50.0
BACK_S: Final = 10.0
"""A node that went is started again after the versions of this time."""
SAMPLE_S: Final = 3.0
LOG_VERSIONS: Final = 5
"""Bytes of logs are counted over so many versions."""
TOGETHER: Final = 20
"""After so many versions everybody is waited for."""
WARM_UP: Final = 20
"""Versions before the first sample: more than the 16 (`Tuning.retain_versions`) of each of which a store keeps a file
open."""
FULL_FOR: Final = 20
"""Versions from the moment when a disk is full to that when it is freed."""
DISKS: Final = {"disk": 48 << 20, "seed": 256 << 20}
"""Bytes of the small disks."""
FULL_WITHIN_S: Final = 30.0
"""A seed whose disk is full says so within this time."""


class Soak:
    """One run; see the module."""

    def __init__(
        self, run: LongRun, disks: dict[str, SmallDisk], *, seed: int, a_minute: float, every_s: float
    ) -> None:
        self._run, self._disks, self._rng = run, disks, random.Random(seed)
        self._pause = 60.0 / (a_minute * len(MEMBERS) * every_s) if a_minute else float("inf")
        """Versions from one node that goes to the next."""
        self._every_s = every_s
        self.table = UsageTable()
        self.churned = self.full = 0
        self._next_churn = self._pause
        self._away: list[tuple[float, str]] = []
        """(the version at which it is started again, the name) of nodes that went."""
        self._sampled_at = 0.0
        """When the last sample was taken."""
        self._log_step = 0
        self._log_bytes: dict[str, int] = {}
        """The model's step when bytes of logs were last counted, and how many there were."""
        self._there: list[float] = []
        """Since then, for each version: the share of the nodes that were there."""

    def go(self, versions: int) -> None:
        """Publish so many versions. Raises `UsageError` when something is not as it must be."""
        third = versions // 3
        for number in range(1, versions + 1):
            began = time.monotonic()
            self._churn(number)
            self._version()
            if self._disks and number == third:
                self._fill_node()
            if self._disks and number == third + min(FULL_FOR, max(1, third // 2)):
                self._free_node()
            if self._disks and number == 2 * third:
                self._fill_and_free_seed()
            if number % TOGETHER == 0 or number == versions:
                self._together(number, versions)
            if number >= min(WARM_UP, third):
                self._sample()
                self._sample_logs()
            time.sleep(max(0.0, began + self._every_s - time.monotonic()))

    # ------------------------------------------------------------ versions

    def _version(self) -> None:
        self._run.publish()
        self._run.until("the seed has sealed the version", self._run.is_head)

    def _together(self, number: int, versions: int) -> None:
        """Wait until all nodes are there and hold the newest version; then compare what counts."""
        for _, name in self._away:
            self._run.start(Actor("node", name))
        self._away.clear()
        self._run.until("everybody holds the version", self._run.all_hold)
        self._run.prove()
        print(
            f"{number}/{versions} versions, {self.churned} nodes went, {self.full} disks were full, "
            f"{self._run.counting.groups} groups",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def _churn(self, number: int) -> None:
        """Before version `number`: start nodes again whose time it is, and have a node go if it is time for that."""
        for at, name in list(self._away):
            if number >= at:
                self._away.remove((at, name))
                self._run.start(Actor("node", name))
        if number < self._next_churn:
            return
        self._next_churn += self._pause
        name = self._rng.choice(sorted(self._run.up - set(STAY)) or [""])
        if not name:
            return
        if self.churned % 2:
            self._run.kill(Actor("node", name))
            self._run.up.discard(name)
        else:
            self._run.stop(name)
        self.churned += 1
        self._away.append((number + BACK_S / self._every_s, name))

    # ------------------------------------------------------------ disks

    def _fill_node(self) -> None:
        self._disks["disk"].fill()
        self._run.up.discard("disk")
        self.full += 1

    def _free_node(self) -> None:
        """Free the node's disk once the node has ended because of it, and start the node again. A node that had failed
        to write, but had not ended yet, would end later, when nobody expects that."""
        run = self._run
        run.until("the node says that its disk is full", lambda: not run.runs("disk"), FULL_WITHIN_S)
        self._disks["disk"].free()
        self._ended_full("disk")
        run.start(Actor("node", "disk"))

    def _fill_and_free_seed(self) -> None:
        """Fill the seed's disk until the seed refuses a version or ends, then free it: nothing goes on without it. A
        seed that has refused a version may end after that: it does when it cannot write its ledger."""
        self._disks["seed"].fill()
        self.full += 1
        run, swarm = self._run, self._run.swarm
        run.publish(may_fail=True)
        run.until("the seed says that its disk is full", lambda: run.answer() or not run.runs("seed"), FULL_WITHIN_S)
        self._disks["seed"].free()
        if run.runs("seed"):
            run.publish_again(may_fail=True)
            run.until("the seed seals the version, or ends", lambda: run.is_head() or not run.runs("seed"))
        if not run.runs("seed"):
            self._ended_full("seed")
            run.start(Actor("seed", "seed"))
            swarm.wait("the seed serves", swarm.status, of=["seed"])
            run.until("the trainer says what became of the version", run.answer)
        run.publish_again()
        run.until("the seed has sealed the version", run.is_head)

    def _ended_full(self, name: str) -> None:
        """A process that has ended did so because its disk was full, with a sentence that says so."""
        code, log = self._run.swarm.ends(name), self._run.swarm.log(name)
        if code != 2 or "full" not in log:
            raise ProcessFailed(f"{name} ended with {code} when its disk was full: {log}")

    # ------------------------------------------------------------ measure

    def _sample(self) -> None:
        now, run = time.monotonic(), self._run
        if now < self._sampled_at + SAMPLE_S:
            return
        self._sampled_at = now
        actors = [Actor("seed", "seed"), Actor("trainer", "trainer"), Actor("node", "steady"), Actor("node", "rest"),
                  Actor("engine", "steady")]  # fmt: skip
        for actor in actors:
            self.table.sample_process(str(actor), run.pid(actor))
        for name in LOOKED_AT:
            self.table.sample(name, "disk", folder_bytes(run.swarm.home(name), without=("ledger.sqlite", "ballast")))
        book = sum(path.stat().st_blocks * 512 for path in run.swarm.home().glob("ledger.sqlite*"))
        self.table.sample("seed", "book", book)

    def _sample_logs(self) -> None:
        self._there.append(len(self._run.up) / len(MEMBERS))
        versions = self._run.model.step - self._log_step
        if versions < LOG_VERSIONS:
            return
        share = {"seed": statistics.fmean(self._there)}
        self._log_step = self._run.model.step
        self._there.clear()
        for name in LOOKED_AT:
            size = (self._run.swarm.folder / f"{name}.log").stat().st_size
            if name in self._log_bytes:
                self.table.sample(
                    name, "log a version", (size - self._log_bytes[name]) / versions / share.get(name, 1.0)
                )
            self._log_bytes[name] = size


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--versions", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--a-minute", type=float, default=0.1, help="share of the nodes that go each minute (.1)")
    parser.add_argument("--every-s", type=float, default=1.0, help="least time from version to version (default 1)")
    parser.add_argument("--no-full-disk", action="store_true", help="fill no disk: needs no root")
    parser.add_argument("--seed", type=int, default=0, help="of who goes (default 0)")
    parser.add_argument("--folder", type=Path, help="keep everything in this new folder; default: a temporary one")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    if options.versions < 4 or options.a_minute < 0 or options.every_s <= 0:
        parser.error("--versions: at least 4; --a-minute: at least 0; --every-s: more than 0")
    if not options.no_full_disk:
        in_own_namespace("scenarios.faults.soak", given)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    began, failed, report = time.monotonic(), [], {}
    rows: list[dict[str, Any]] = []
    try:
        homes = folder / "swarm"
        disks = {} if options.no_full_disk else {name: SmallDisk(homes / name, size) for name, size in DISKS.items()}
        with long_run(folder, MEMBERS, seed=options.seed, up_mbit=UP_MBIT) as run:
            soak = Soak(run, disks, seed=options.seed, a_minute=options.a_minute, every_s=options.every_s)
            try:
                soak.go(options.versions)
            finally:  # a run that fails after an hour tells what it measured until then
                rows = soak.table.rows()
                report = {"churned": soak.churned, "full": soak.full, "groups": run.counting.groups}
    except UsageError as error:
        failed.append(str(error))
    failed += [f"{row['of']}: {row['what']} grew by {row['growth']:.1%}" for row in rows if row["flat"] is False]
    report |= {"versions": options.versions, "seconds": time.monotonic() - began}
    if options.json:
        print(
            json.dumps({"scenario": "soak", "seed": options.seed, "failed": failed, **report, "rows": rows}, indent=1)
        )
    elif rows:
        UsageTable.print_rows(rows)
        print(", ".join(f"{name} {value:,.0f}" for name, value in report.items()))
    if failed:
        print("\n".join([*failed, f"soak: failed; logs: {folder} (seed {options.seed})"]), file=sys.stderr)
    elif options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    run_as_program(main)
