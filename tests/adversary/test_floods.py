"""The bounds that hold whatever a member sends: heartbeats in time, no lease lost, a version hardly slower, memory.

Each kind of traffic is sent by one member, or by ten on one ticket, at 100 Mbit/s together, by a process of its own.
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
"""A version in flight may take so many times as long as without the attack,"""
GRACE_S = 0.15
"""and this longer: two cores carry the victims, the attackers and the test."""
SETTLE_S = 0.3
"""After an attacker stands still, what it has said already is dealt with."""
MEMORY = 64 * MIB
LOG_LINES_S = 10
"""What an attack may add to a log, beside what joining and leaving say."""
FRAMES = ["empty frames", "pings", "streams opened and reset", "streams opened, negotiated and reset"]
SHORT = ["reports with made-up keys", "huge Attach lists", "bad Work bodies", "forged gossip", "empty frames"]
"""Those that CI's short form tries: what was worst. In full all are."""


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Arena]:
    """An arena with 30 MB of model, so that a version takes a while."""
    with arena_in(tmp_path, words=weights(tensors=32, elements=480_000), density=0.1) as made:
        yield made
        made.unharmed()


async def bounded(arena: Arena, what: str, members: int, *, at_box: bool = False) -> None:
    """Time versions with the attack and, in turns, while it stands still; judge all that it did."""
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
    told = (
        f"{what}, {members} members: {flood.told}; late {late_s:.2f} s, version {median(quiet):.2f} -> "
        f"{median(loud):.2f} s, {worst / MIB:+.0f} MiB, {added / took_s:.1f} lines/s "
        f"{dict(lines.most_common(3))}, CPU {cpu:.2f}"
    )
    tell(told)
    assert flood.told["sent_bytes"], told
    assert late_s < LATE_S, told
    assert arena.honest_leases_lost() == [], told
    assert median(loud) <= SLOWER * median(quiet) + GRACE_S, told
    assert worst <= MEMORY, told
    assert added <= LOG_LINES_S * took_s + 20 * (len(loud) + members), told


def tell(text: str) -> None:
    """For whoever runs `make adversary`, and into ADVERSARY_TOLD if that names a file."""
    print(text)
    if path := os.environ.get("ADVERSARY_TOLD"):
        with Path(path).open("a") as file:
            file.write(text + "\n")


@pytest.mark.parametrize("what", [w for w in (*CONTROL, *BULK, GOSSIP, REPLAY, *FRAMES) if w in SHORT or FULL])
async def test_one_member_at_100_mbit(large: Arena, what: str) -> None:
    await bounded(large, what, 1)


@pytest.mark.parametrize("what", [w for w in CONTROL if w in SHORT[:1] or FULL])
async def test_ten_sybils_on_one_ticket_at_100_mbit(large: Arena, what: str) -> None:
    await bounded(large, what, 10)


@pytest.mark.parametrize("what", [w for w in CONTROL if w in SHORT[:1] or FULL])
async def test_one_member_at_a_node(large: Arena, what: str) -> None:
    """The same at a node, which has the same promises to keep as the seed."""
    await bounded(large, what, 1, at_box=True)
