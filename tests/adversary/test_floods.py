"""The bounds that hold whatever a member sends: heartbeats in time, no lease lost, a version hardly slower, memory.

Each kind of traffic is sent by one member, or by ten on one ticket, at 100 Mbit/s together, by a process of its own.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import trio
from arena_kit import FLOOD_S, LATE_S, MIB, PASSES, Arena, arena_in, observed
from attack_kit import attack
from kit import weights
from traffic_kit import BULK, CONTROL, GOSSIP, REPLAY

pytestmark = [pytest.mark.slow, pytest.mark.adversary]

SLOWER = 1.3
"""A version in flight may take so many times as long as without the attack,"""
GRACE_S = 0.15
"""and this longer: two cores carry the victims, the attackers and the test."""
MEMORY = 64 * MIB
LOG_LINES_S = 5
"""What an attack may add to a log, beside what joining and leaving say."""
ONE_OR_TEN = [1, 10]
FRAMES = ["empty frames", "pings", "streams opened and reset", "streams opened, negotiated and reset"]
SHORT = ["reports with made-up keys", "own reports repeated", "bad Work bodies", "wants of the model without reading"]
"""Those that are tried by ten as well in CI's short form; in full all are."""


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Arena]:
    """An arena with 30 MB of model, so that a version takes a while."""
    with arena_in(tmp_path, words=weights(tensors=32, elements=480_000)) as made:
        yield made
        made.unharmed()


async def bounded(arena: Arena, what: str, members: int, mbit: float = 100.0) -> None:
    """Time versions without and with the attack, and judge all that it did."""
    seed = arena.process()
    async with observed(arena) as observer:
        await arena.flight_s()  # kernels are warm, caches filled
        quiet = [await arena.flight_s() for _ in range(PASSES)]
        before, worst, lines, cpu_s = seed.rss_bytes, 0, arena.log_lines(), seed.cpu_s
        began = trio.current_time()

        async def weigh() -> None:
            nonlocal worst
            while True:
                worst = max(worst, seed.rss_bytes - before)
                await trio.sleep(0.1)

        async with attack(arena, what, members=members, mbit=mbit) as flood, trio.open_nursery() as nursery:
            nursery.start_soon(weigh)
            await trio.sleep(1)
            observer.reset()
            loud: list[float] = []
            until_s = trio.current_time() + FLOOD_S
            while len(loud) < PASSES or trio.current_time() < until_s:
                loud.append(await arena.flight_s())
            late_s, took_s = observer.late_s, trio.current_time() - began
            cpu = (seed.cpu_s - cpu_s) / took_s
            nursery.cancel_scope.cancel()
        added = arena.log_lines() - lines
    told = (
        f"{what}, {members} members: {flood.told}; late {late_s:.2f} s, version {median(quiet):.2f} -> "
        f"{median(loud):.2f} s, {worst / MIB:+.0f} MiB, {added / took_s:.1f} lines/s, CPU {cpu:.2f}"
    )
    print(told)
    assert late_s < LATE_S, told
    assert arena.honest_leases_lost() == [], told
    assert median(loud) <= SLOWER * median(quiet) + GRACE_S, told
    assert worst <= MEMORY, told
    assert added <= LOG_LINES_S * took_s + 20 * (len(loud) + members), told


@pytest.mark.parametrize("what", [*CONTROL, *BULK, GOSSIP, REPLAY, *FRAMES])
async def test_one_member_at_100_mbit(large: Arena, what: str) -> None:
    await bounded(large, what, 1)


@pytest.mark.parametrize("what", [w for w in CONTROL if w in SHORT or FLOOD_S > 10])
async def test_ten_sybils_on_one_ticket_at_100_mbit(large: Arena, what: str) -> None:
    await bounded(large, what, 10)
