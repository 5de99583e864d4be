"""Bounds under any traffic of members: heartbeats in time, no lease lost, versions hardly slower, memory, logs.

One member, or ten on one ticket, send each kind of traffic at 100 Mbit/s together, from a separate process.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import trio
from arena_kit import FLOOD_S, FULL, LATE_S, MIB, PASSES, Arena, arena_in, observed
from attack_kit import attack
from kit import weights
from traffic_kit import BULK, CONTROL, GOSSIP, REPLAY

pytestmark = [pytest.mark.slow, pytest.mark.adversary, pytest.mark.alone]

SLOWER = 1.3
"""A version may take this many times as long as without the attack, plus `GRACE_S`."""
GRACE_S = 0.15
"""Seconds: the victims, the attackers and the test share two cores."""
SETTLE_S = 0.3
"""Pause after an attacker is stopped, in which the victim handles its queued messages, s."""
MEMORY = 64 * MIB
LOG_LINES_S = 10
"""Log lines per second that an attack may add, besides those of joining and leaving."""
FRAMES = ["empty frames", "pings", "streams opened and reset", "streams opened, negotiated and reset"]
TRAFFIC = [*CONTROL, *BULK, GOSSIP, REPLAY, *FRAMES]
SHORT = ["bad Work bodies"]
SHORT_CONTROL = ["reports with made-up keys"]
"""The traffic of CI's short form: the most expensive kinds. The full form sends every kind."""
assert {*SHORT, *SHORT_CONTROL} <= set(TRAFFIC)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Arena]:
    """An arena with a model of 30 MB, so that a version takes long enough to measure."""
    with arena_in(tmp_path, words=weights(tensors=32, elements=480_000), density=0.1) as arena:
        yield arena
        arena.unharmed()


async def bounded(arena: Arena, what: str, members: int, *, at_box: bool = False) -> None:
    """Time versions in turn during the attack and while it is paused, and check all bounds."""
    victim = arena.process("box" if at_box or what == REPLAY else "seed")
    quiet: list[float] = []
    loud: list[float] = []
    worst = 0
    async with observed(arena) as observer:
        await arena.flight_s()  # kernels are warm, caches filled
        before, lines, cpu_s = victim.rss_bytes, arena.log_events(), victim.cpu_s

        async def weigh() -> None:
            nonlocal worst
            while True:
                worst = max(worst, victim.rss_bytes - before)
                await trio.sleep(0.1)

        async with attack(arena, what, members=members, at_box=at_box) as flood, trio.open_nursery() as nursery:
            nursery.start_soon(weigh)
            await trio.sleep(1)
            began = trio.current_time()
            observer.reset()
            while len(loud) < PASSES or trio.current_time() < began + FLOOD_S:
                loud.append(await arena.flight_s())
                with flood.paused():
                    await trio.sleep(SETTLE_S)
                    quiet.append(await arena.flight_s())
            late_s, took_s = observer.late_s, trio.current_time() - began
            cpu = (victim.cpu_s - cpu_s) / took_s
            nursery.cancel_scope.cancel()
        lines = arena.log_events() - lines
    added = lines.total()
    summary = (
        f"{what}, {members} members: {flood.progress}; late {late_s:.2f} s, version {median(quiet):.2f} -> "
        f"{median(loud):.2f} s, {worst / MIB:+.0f} MiB, {added / took_s:.1f} lines/s "
        f"{dict(lines.most_common(3))}, CPU {cpu:.2f}"
    )
    report(summary)
    assert flood.progress["sent_bytes"], summary
    assert late_s < LATE_S, summary
    assert arena.honest_leases_lost() == [], summary
    assert median(loud) <= SLOWER * median(quiet) + GRACE_S, summary
    assert worst <= MEMORY, summary
    assert added <= LOG_LINES_S * took_s + 20 * (len(loud) + members), summary


def report(text: str) -> None:
    """Print the measurements, and append them to the file that ADVERSARY_REPORT names, if it is set."""
    print(text)
    if path := os.environ.get("ADVERSARY_REPORT"):
        with Path(path).open("a") as file:
            file.write(text + "\n")


@pytest.mark.parametrize("what", [w for w in TRAFFIC if w in SHORT or FULL])
async def test_one_member_at_100_mbit(large: Arena, what: str) -> None:
    await bounded(large, what, 1)


@pytest.mark.parametrize("what", [w for w in CONTROL if w in SHORT_CONTROL or FULL])
async def test_ten_sybils_on_one_ticket_at_100_mbit(large: Arena, what: str) -> None:
    await bounded(large, what, 10)


@pytest.mark.parametrize("what", [w for w in CONTROL if w in SHORT_CONTROL or FULL])
async def test_one_member_at_a_node(large: Arena, what: str) -> None:
    """The same bounds for a node."""
    await bounded(large, what, 1, at_box=True)
