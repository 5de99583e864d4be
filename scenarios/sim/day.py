"""A day of virtual time: versions, nodes that come and go, trainers that are killed. Memory stays flat, and all agree.

    python -m scenarios.sim.day                                      1,000 nodes, 24 hours
    python -m scenarios.sim.day --nodes 64 --hours 2 --every-s 120
    python -m scenarios.sim.day --nodes 200 --hours 6 --per-minute 0.01 --restarts 4
    python -m scenarios.sim.day --beat-s 30                          a sixth of the work, and deaths are seen later

A version of `--mib` is published every `--every-s` seconds. Of the share `--per-minute`, half leave, are killed, or
hang until they are killed a minute later, in turn; the other half join, one in two of them without the model. The
trainer is killed `--restarts` times, in the middle of a version, and is back after five seconds with its disk.

One row an hour. *versions*: sealed so far. *median* and *slowest*: seconds until a version of that hour was everywhere.
*authority*, *node*: bytes of the Python objects that the core of the trainer has, and that of the median node of some.
*records*: what the trainer's disk has. *resident*: MiB of this process, which also holds what the simulator needs.

Exits with 1 if at the end a node lacks the head or has other bits, if a node saw two versions of one number, if a
version was not everywhere when the next one began, or if the mean of authority, node or resident in the last quarter is
more than 5 % above that of the second. In the first quarter histories fill: the nodes come to hold the last 16 versions
and the last 128 changes of the roster.
"""

import gc
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from scenarios.harness.usage import ProcessUsage
from scenarios.sim.crowd import REGIONS, Crowd, begin, draw, gather
from scenarios.sim.rows import crowd_of, number, parser, show, verdict
from scenarios.sim.virtual import Node
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.notices import Equivocation, Notice
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.member import Peer

__all__ = ["Day", "drift", "held_bytes", "main", "wrong"]

HOW: Final = ("leave", "kill", "freeze")
FROZEN_S: Final = 60.0
"""A node that hangs is killed after this time."""
SPREADING_S: Final = 0.3
"""From the seal of a version to the kill of the trainer: the version is on its way."""
AWAY_S: Final = 5.0
"""From the kill of the trainer to its restart."""
SAMPLED: Final = 16
"""Nodes whose cores are measured each hour."""
REACH: Final = 0.05
"""Growth from the second to the last quarter."""
END_S: Final = 300.0
"""Calm time at the end, within which all must hold the head."""
_SHARED: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, CodeType)
COLUMNS: Final = {
    "hour": number("hour", "g"),
    "versions": number("versions", "d"),
    "nodes": number("nodes", "d"),
    "median": number("median_s", ".1f"),
    "slowest": number("slowest_s", ".1f"),
    "authority": number("authority_bytes", ",d"),
    "node": number("node_bytes", ",d"),
    "records": number("records", "d"),
    "resident": number("resident_mib", ".1f"),
    "cpu s": number("cpu_s", ".0f"),
}


def held_bytes(root: object) -> int:
    """Bytes of the Python objects that `root` refers to, once each; without classes, functions and modules, and without
    what only C code holds (keys of signatures)."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _SHARED):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        waiting += gc.get_referents(each)
    return total


def _tuning(beat_s: float) -> Tuning:
    """The preset `wan` with another heartbeat period, and all that is counted in heartbeats."""
    wan = Tuning.wan()
    slower = beat_s / wan.heartbeat_s
    return replace(
        wan, heartbeat_s=beat_s, soft_ttl_s=slower * wan.soft_ttl_s, hard_ttl_s=slower * wan.hard_ttl_s,
        tick_s=slower * wan.tick_s,
    )  # fmt: skip


@dataclass
class _Version:
    """One that was published. `nodes`: those that were there, until they have it or are gone."""

    id: VersionId
    at: float
    nodes: list[Node]
    took_s: float = 0.0


class Day:
    """Runs a day; see the module. `rows` has a row for each hour that has passed."""

    def __init__(
        self,
        crowd: Crowd,
        payload_bytes: int,
        seed: int,
        *,
        every_s: float,
        per_minute: float,
        restarts: int,
        beat_s: float = 5.0,
    ) -> None:
        self._crowd, self._payload, self._every_s, self._per_minute = crowd, payload_bytes, every_s, per_minute
        self._restarts, self._rng, self._ways = restarts, random.Random(seed), cycle(HOW)
        self.world = gather(crowd, seed, _tuning(beat_s))
        self.world.on_notice = self._note
        self._grave: Peer | None = None
        self.equivocations = 0
        self.notices: Counter[str] = Counter()
        self.versions = 0
        self.late = 0
        """Versions that were not everywhere when the next one began."""
        self.rows: list[dict[str, Any]] = []
        self._took: list[float] = []

    def run(self, hours: float) -> None:
        """Advance the clock by this many hours, and then by the calm time."""
        began = self.world.now
        end = began + 3600 * hours
        restarts = [began + 3600 * hours * (i + 0.5) / self._restarts for i in range(self._restarts)]
        current: _Version | None = None
        next_row, next_version, minute = began + 3600, began, began + 60
        while (now := self.world.now) < end:
            if now >= next_version:
                self._close(current)
                current = self._publish()
                next_version += self._every_s
                if restarts and now >= restarts[0]:
                    restarts.pop(0)
                    self._kill_trainer()
            if now >= minute:
                self._churn()
                minute += 60
            self.world.run(min(now + 1.0, end))
            self._look(current)
            if self.world.now >= next_row:
                self._measure((self.world.now - began) / 3600)
                next_row += 3600
        self._close(current)
        self.world.run_until(lambda: self.world.all_hold(self.head), END_S, 1.0)

    @property
    def head(self) -> VersionId:
        held = self.world.authority.core.state.held
        assert held is not None
        return held

    # ------------------------------------------------------------ what happens

    def _publish(self) -> _Version:
        begun = begin(self.world, self._payload)
        self.versions += 1
        return _Version(begun.published.id, self.world.now, list(begun.nodes))

    def _kill_trainer(self) -> None:
        self.world.run(self.world.now + SPREADING_S)
        self.world.kill(self.world.authority)
        self.world.run(self.world.now + AWAY_S)
        self.world.restart_authority()

    def _churn(self) -> None:
        """Half of the share leaves, half joins."""
        count = len(self.world.members()) * self._per_minute / 2
        whole = int(count) + (self._rng.random() < count % 1)
        for node in self._rng.sample(self.world.members(), min(whole, len(self.world.members()) - 1)):
            getattr(self, f"_{next(self._ways)}")(node)
        for _ in range(whole):
            link, empty = draw(self._crowd, self._rng), self._rng.random() < 0.5
            self.world.join(link, held=None if empty else self.world.base, region=REGIONS[link.region])

    def _leave(self, node: Node) -> None:
        self.world.leave(node)
        self.world.at(self.world.now + 1.0, self._kill, node)

    def _kill(self, node: Node) -> None:
        self.world.kill(node)
        self.world.at(self.world.now + 600.0, self._bury, node)

    def _freeze(self, node: Node) -> None:
        self.world.freeze(node)
        self.world.at(self.world.now + FROZEN_S, self._kill, node)

    def _bury(self, node: Node) -> None:
        """Free what the simulator keeps of a dead node: all but its name and address."""
        assert isinstance(node.core, Peer)
        self._grave = self._grave or node.core
        node.core = self._grave
        for held in (node.disk, node.headers, node.pieces, node.labels, node.lists, node.timers, node.asked,
                     node.held_at, node.notices, node.dropped, node.later, node.banned, node.flows):  # fmt: skip
            held.clear()

    # ------------------------------------------------------------ what is seen

    def _note(self, node: Node, notice: Notice) -> None:
        self.notices[type(notice).__name__] += 1
        self.equivocations += isinstance(notice, Equivocation)

    def _look(self, version: _Version | None) -> None:
        """Note the version as finished once every node that was there at its start, and is still, has it."""
        if version is None or version.took_s:
            return
        version.nodes = [n for n in version.nodes if version.id not in n.held_at and n.alive and not n.frozen]
        if not version.nodes:
            version.took_s = self.world.now - version.at
            self._took.append(version.took_s)

    def _close(self, version: _Version | None) -> None:
        """Before the next version: free what the simulator keeps of this one."""
        if version is None:
            return
        self._look(version)
        self.late += not version.took_s
        for node in self.world.nodes.values():
            node.held_at.clear()
            node.dropped.clear()
            node.lists.intersection_update({node.root})

    def _measure(self, hour: float) -> None:
        gc.collect()
        members = self.world.members()
        sampled = members[:: max(1, len(members) // SAMPLED)]
        usage = ProcessUsage(os.getpid())
        self.rows.append({
            "hour": round(hour, 3),
            "versions": self.versions,
            "nodes": len(members),
            "median_s": statistics.median(self._took) if self._took else None,
            "slowest_s": max(self._took, default=None),
            "authority_bytes": held_bytes(self.world.authority.core),
            "node_bytes": round(statistics.median(held_bytes(node.core) for node in sampled)),
            "records": len(self.world.authority.disk),
            "resident_mib": usage.rss_bytes / 2**20,
            "cpu_s": time.process_time(),
        })  # fmt: skip
        self._took.clear()
        row = self.rows[-1]
        print("  ".join(f"{name} {cell(row)}" for name, cell in COLUMNS.items()), file=sys.stderr, flush=True)


def drift(rows: Sequence[dict[str, Any]], name: str) -> float:
    """How much larger the mean of a column is in the last quarter of the rows than in the second. There must be at
    least four rows."""
    quarter = len(rows) // 4
    second, last = rows[quarter : 2 * quarter], rows[-quarter:]
    return statistics.fmean(row[name] for row in last) / statistics.fmean(row[name] for row in second) - 1


def wrong(day: Day) -> list[str]:
    """What is not as it must be, one sentence each."""
    members, found = day.world.members(), []
    lacking = sum(node.core.state.held != day.head for node in members)
    if lacking:
        found.append(f"{lacking} of {len(members)} nodes lack the head at the end")
    if len({node.root for node in [*members, day.world.authority]}) != 1:
        found.append("nodes have different bits at the end")
    if day.equivocations:
        found.append(f"{day.equivocations} times a node saw two versions of one number")
    if day.late:
        found.append(f"{day.late} of {day.versions} versions were not everywhere when the next one began")
    for name in ("authority_bytes", "node_bytes", "resident_mib"):
        if len(day.rows) >= 4 and (grown := drift(day.rows, name)) > REACH:
            found.append(f"{name} grew by {grown:.1%} from the second quarter to the last")
    return found


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.set_defaults(mib=4.0, congestion="bbr")
    options_parser.add_argument("--nodes", type=int, default=1000)
    options_parser.add_argument("--hours", type=float, default=24.0, help="virtual hours (default 24)")
    options_parser.add_argument("--every-s", type=float, default=600.0, help="from publish to publish (default 600)")
    options_parser.add_argument("--per-minute", type=float, default=0.002, help="share that leaves or joins (.002)")
    options_parser.add_argument("--restarts", type=int, default=4, help="how often the trainer is killed (default 4)")
    options_parser.add_argument("--beat-s", type=float, default=5.0, help="heartbeat period (default 5, the product's)")
    options = options_parser.parse_args(arguments)
    tuning = _tuning(options.beat_s)
    if tuning.tick_s > tuning.hello_deadline_s:
        most_s = options.beat_s * tuning.hello_deadline_s / tuning.tick_s
        options_parser.error(f"--beat-s: at most {most_s:.0f}, or the trainer closes sessions before it admits anybody")
    days, sentences = [], []
    for seed in range(options.seed, options.seed + options.seeds):
        day = Day(
            crowd_of(options, options.nodes), int(options.mib * 2**20), seed,
            every_s=options.every_s, per_minute=options.per_minute, restarts=options.restarts,
            beat_s=options.beat_s,
        )  # fmt: skip
        day.run(options.hours)
        days += [{"seed": seed} | row for row in day.rows]
        sentences += [f"{sentence} (seed {seed})" for sentence in wrong(day)]
    show("day", days, as_json=options.json, columns=COLUMNS)
    return verdict("day", sentences)


if __name__ == "__main__":
    sys.exit(main())
