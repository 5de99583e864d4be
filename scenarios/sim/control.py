"""The control messages, planning time and connections that a swarm needs.

python -m scenarios.sim.control                      sizes and planning at 10, 1,000 and 10,000 members: a minute
python -m scenarios.sim.control --sessions 64 1000   simulated: the trainer's connections while all nodes work, a
                                                     version is published, a root child is lost, and the trainer
                                                     restarts
"""

import json
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from msgspec.structs import replace

from codec.sign import Key
from scenarios.harness.command import json_parser
from scenarios.sim.crowd import Crowd, begin, finish, gather
from scenarios.sim.virtual import Node
from swarm.protocol.core.documents import Grant, Heartbeat, Link, Report, bit_set, seal
from swarm.protocol.member import Peer
from swarm.protocol.membership.roster import Member, Roster, difference, seal_change, whole
from swarm.protocol.topology.planner import Planner

__all__ = ["main", "sessions", "sizes"]

STRIPES, REGIONS = 8, 6
ROUNDS = 5
"""Each planning time is the median of this many."""


def members(count: int, rng: random.Random) -> list[Member]:
    """Return members as in a roster, each with one IPv4 address, a name of ten bytes, and one of six regions."""
    found = []
    for slot in range(count):
        addr = f"/ip4/{rng.randrange(11, 200)}.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}/tcp/4001"
        up = round(rng.lognormvariate(0.0, 0.5) * 200.0, 1)
        region = f"region{rng.randrange(REGIONS)}"
        found.append(Member(slot, rng.randbytes(32), (addr,), True, f"node{slot:06}", region, up, False))
    return found


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def sizes(count: int, seed: int = 0) -> dict[str, Any]:
    """Return one column of the table: bytes of each message, and seconds of planning, for `count` members."""
    rng = random.Random(seed)
    key, there = Key(rng.randbytes(32)), members(count + 1, rng)
    swarm, everyone, newcomer = key.public, there[:count], there[count]

    def roster(who: list[Member], serial: int, parents: tuple[tuple[int, ...], ...]) -> Roster:
        return Roster(swarm, 1, serial, ("/ip4/203.0.113.7/tcp/4001",), tuple(who), parents)

    def plan() -> tuple[tuple[Roster, Roster, Roster], tuple[float, float, float]]:
        """The rosters of all, with one more, and without one of these; and how long planning each took, in seconds."""
        planner = Planner(STRIPES, "region0")
        parents, grown_s = _timed(lambda: planner.update(everyone))
        first = roster(everyone, 1, parents)
        parents, came_s = _timed(lambda: planner.update([*everyone, newcomer]))
        second = roster([*everyone, newcomer], 2, parents)
        gone = [*everyone[: count // 2], *everyone[count // 2 + 1 :], newcomer]
        parents, left_s = _timed(lambda: planner.update(gone))
        return (first, second, roster(gone, 3, parents)), (grown_s, came_s, left_s)

    plans = [plan() for _ in range(ROUNDS)]
    first, second, third = plans[-1][0]
    grown, came, left = zip(*(seconds for _, seconds in plans), strict=True)
    slots = range(count)
    soft = set(rng.sample(slots, max(1, count // 100)))
    empty = set(rng.sample(slots, count // 50))

    def beat(live: list[int], fresh: list[int]) -> int:
        return len(seal(Heartbeat(swarm, 1, 70_000, 1.7e9, 1 << 32, 0, 500, bit_set(live), bit_set(fresh)), key))

    live = [s for s in slots if s not in empty]
    plain = Report(
        swarm, swarm, count - 1, 1 << 32, 40_000, bytes(32), 0, 500, 0, 500, "vllm", 10**12, 10**12, 5000.0, False, 1.0,
        fetched_bytes=10**10,
    )  # fmt: skip
    links = tuple(Link(slot % count, 25_000, 0, 120) for slot in range(16))
    return {
        "members": count,
        "heartbeat": beat(list(slots), list(slots)),
        "heartbeat_gaps": beat(live, [s for s in live if s not in soft]),
        "report": len(seal(plain, key)),
        "report_links": len(seal(replace(plain, links=links), key)),
        "report_gifts": len(seal(replace(plain, gave=tuple((s % count, 10**9) for s in range(16))), key)),
        "grant": len(seal(Grant(swarm, swarm, count - 1, 1 << 32, 1.7e9, bytes(16)), key)),
        "change_leaves": len(seal_change(difference(second, third), key)),
        "change_joins": len(seal_change(difference(first, second), key)),
        "roster": len(whole(first, seal_change(difference(None, first), key))),
        "plan_from_nothing_s": median(grown),
        "plan_one_joins_s": median(came),
        "plan_one_leaves_s": median(left),
    }


def sessions(count: int, seed: int = 0, *, mib: float = 10.0) -> dict[str, Any]:
    """The trainer's connections and control bytes while `count` nodes work, one version is published, a child of the
    root is killed, and the trainer restarts."""
    world = gather(Crowd(count), seed)
    for node in world.members():
        core = node.core
        assert isinstance(core, Peer)
        core.membership.renewals.account.engine = "vllm"  # a node with an engine keeps a session with the trainer
    beat_s = world.tuning.heartbeat_s

    def watch(seconds: float) -> tuple[int, float]:
        """The largest number of simultaneous sessions, and the control bytes that the trainer sent per second."""
        most, before, began = 0, world.authority.socket_bytes, world.now
        while world.now < began + seconds:
            world.run(world.now + 0.25)
            most = max(most, len(world.authority.sessions))
        return most, (world.authority.socket_bytes - before) / (world.now - began)

    arriving, _ = watch(4 * beat_s)
    resting, control = watch(4 * beat_s)
    step = finish(world, begin(world, int(mib * 2**20)))
    stepping = len(world.authority.sessions)
    roster = world._core.state.roster
    assert roster is not None
    root_children = {roster.root_children(stripe)[0] for stripe in range(roster.stripes)}
    victim: Node = next(n for n in world.members() if (m := roster.member_of(n.key.public)) and m.slot in root_children)
    world.kill(victim)
    losing, _ = watch(world.tuning.hard_ttl_s)
    world.restart_authority()
    returning, _ = watch(12 * beat_s)
    there = sum(n.core.standing(world.now).value == "fresh" for n in world.members() if isinstance(n.core, Peer))
    return {
        "members": count,
        "kept": world.tuning.sessions_kept,
        "work_begins": arriving,
        "at_rest": resting,
        "after_a_step": stepping,
        "a_root_child_dies": losing,
        "trainer_restarts": returning,
        "control_bytes_s": control,
        "copies": step.copies,
        "fresh_at_the_end": there,
    }


def _table(rows: list[dict[str, Any]]) -> None:
    for name in rows[0]:
        cells = [row[name] for row in rows]
        text = [f"{1000 * c:.2f} ms" if name.endswith("_s") and name.startswith("plan") else
                f"{c:,.3f}" if isinstance(c, float) else f"{c:,}" for c in cells]  # fmt: skip
        print(f"{name:>20}  " + "  ".join(f"{cell:>12}" for cell in text))


def main(arguments: list[str] | None = None) -> int:
    options_parser = json_parser(__doc__)
    options_parser.add_argument("--members", type=int, nargs="+", default=[10, 1000, 10_000])
    options_parser.add_argument("--sessions", type=int, nargs="+", help="simulate this many nodes instead")
    options_parser.add_argument("--seed", type=int, default=0)
    options = options_parser.parse_args(arguments)
    if options.sessions:
        rows = [sessions(count, options.seed) for count in options.sessions]
    else:
        rows = [sizes(count, options.seed) for count in options.members]
    if options.json:
        print(json.dumps({"scenario": "control", "rows": rows}, indent=1))
    else:
        _table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
