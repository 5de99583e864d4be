"""The queue before the core: a peer whose events cost much delays only itself."""

import trio
import trio.testing

from swarm.protocol.core.events import Event, Gave
from swarm.runtime.event_queue import OURS, EventQueue

FLOODER, HONEST = b"f", b"h"


def event(peer: bytes) -> Event:
    return Gave(peer, 1)


def take(queue: EventQueue, seconds: float = 0.001) -> bytes:
    """Serve the next event at this cost, in seconds. Returns its owner."""
    waiting = queue.take_next()
    assert waiting is not None
    queue.charge_event(waiting, seconds)
    return waiting.owner


def test_a_peer_that_floods_delays_only_itself() -> None:
    queue = EventQueue(1000, 1 << 20)
    for _ in range(500):
        queue.put_nowait(event(FLOODER), FLOODER)
    queue.put_nowait(event(HONEST), HONEST)
    assert HONEST in {take(queue), take(queue)}


def test_time_and_not_events_is_shared() -> None:
    queue = EventQueue(1000, 1 << 20)
    for _ in range(300):
        queue.put_nowait(event(FLOODER), FLOODER)
        queue.put_nowait(event(HONEST), HONEST)
    served = []
    for _ in range(110):
        owner = queue._turns[0][2]
        served.append(take(queue, 0.010 if owner == FLOODER else 0.001))
    assert 95 <= served.count(HONEST) <= 102, "ten cheap events for each expensive one"


def test_charges_apart_from_events_count() -> None:
    queue = EventQueue(1000, 1 << 20)
    queue.put_nowait(event(FLOODER), FLOODER)
    queue.put_nowait(event(HONEST), HONEST)
    take(queue)
    take(queue)
    queue.charge(FLOODER, 1.0)
    queue.put_nowait(event(FLOODER), FLOODER)
    queue.put_nowait(event(HONEST), HONEST)
    assert take(queue) == HONEST


def test_an_idle_peer_saves_nothing_up() -> None:
    queue = EventQueue(1000, 1 << 20)
    for _ in range(100):
        queue.put_nowait(event(FLOODER), FLOODER)
        take(queue, 0.01)
    for _ in range(10):
        queue.put_nowait(event(FLOODER), FLOODER)
        queue.put_nowait(event(HONEST), HONEST)
    first = [take(queue, 0.01) for _ in range(6)]
    assert first.count(FLOODER) >= 2, "a peer that was idle is not owed the time that others used"


def test_one_peers_events_keep_their_order_and_our_own_go_first() -> None:
    queue = EventQueue(1000, 1 << 20)
    for size in range(5):
        queue.put_nowait(Gave(HONEST, size), HONEST)
    queue.put_nowait(event(OURS), OURS)
    taken = []
    while (waiting := queue.take_next()) is not None:
        queue.charge_event(waiting, 0.001)
        taken.append(waiting)
    assert taken[0].owner == OURS
    assert [w.event.size_bytes for w in taken[1:]] == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]


async def test_a_full_queue_makes_its_own_peer_wait_and_no_other() -> None:
    queue = EventQueue(4, 1000)
    for _ in range(4):
        await queue.put(event(FLOODER), FLOODER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.put, event(FLOODER), FLOODER)
        await trio.testing.wait_all_tasks_blocked()
        assert len(queue) == 4
        await queue.put(event(HONEST), HONEST)
        assert len(queue) == 5
        while take(queue) != FLOODER:
            pass
        await trio.testing.wait_all_tasks_blocked()
    assert HONEST in {take(queue) for _ in range(len(queue))} or len(queue._owners[FLOODER].waiting) == 0


async def test_bytes_are_bounded_but_one_event_always_fits() -> None:
    queue = EventQueue(100, 1000)
    assert queue.put_nowait(event(HONEST), HONEST, 5000)
    assert not queue.put_nowait(event(HONEST), HONEST, 1)
    take(queue)
    assert queue.put_nowait(event(HONEST), HONEST, 1)


async def test_close_wakes_every_waiting_task() -> None:
    queue = EventQueue(1, 1000)
    done = trio.Event()
    await queue.put(event(OURS), OURS, 0, done)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.put, event(OURS), OURS)
        await trio.testing.wait_all_tasks_blocked()
        queue.close()
    assert done.is_set()


def test_prune_forgets_idle_owners() -> None:
    queue = EventQueue(100, 1000)
    for number in range(50):
        owner = bytes([number + 1])
        queue.put_nowait(event(owner), owner)
    for _ in range(50):
        take(queue, 0.0)
    queue.prune()
    assert len(queue._owners) == 1


def test_events_that_never_waited_count_too() -> None:
    queue = EventQueue(1000, 1 << 20)
    queue.charge_new(FLOODER, 0.050)
    queue.charge_new(HONEST, 0.001)
    queue.put_nowait(event(FLOODER), FLOODER)
    queue.put_nowait(event(HONEST), HONEST)
    assert [take(queue), take(queue)] == [HONEST, FLOODER]
    assert queue.is_empty
