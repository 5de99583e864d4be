"""Trainers of different parts publish one after another; a trainer of the same part is refused."""

import pytest
import trio
import trio.testing

from codec.parts import BASE, Part
from node.coordinator import turns
from node.coordinator.turns import Busy, Turns

ONE, OTHER = Part.adapter(0), Part.adapter(1)


async def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    queue, order = Turns(), []

    async def publish(part: Part) -> None:
        for _ in range(3):
            turn = await queue.take(part, "process 1")
            order.append(part)
            await trio.lowlevel.checkpoint()
            turn.end()
            turn.end()

    async with trio.open_nursery() as nursery:
        held = await queue.take(Part.adapter(9), "process 2")
        for part in (BASE, ONE, OTHER):
            nursery.start_soon(publish, part)
            await trio.testing.wait_all_tasks_blocked()
        assert queue.waiting == 3
        held.end()
    assert order == 3 * [BASE, ONE, OTHER], "none publishes twice while another waits"
    assert queue.waiting == 0


async def test_a_second_trainer_of_the_same_part_is_refused_at_once() -> None:
    queue = Turns()
    held = await queue.take(ONE, "process 7")
    with pytest.raises(Busy, match=r"process 7.*adapter/00"):
        await queue.take(ONE, "process 8")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.take, OTHER, "process 9")
        await trio.testing.wait_all_tasks_blocked()
        assert queue.waiting == 1
        with pytest.raises(Busy, match="process 9"):
            await queue.take(OTHER, "process 10")
        held.end()


async def test_one_that_ends_while_it_waits_leaves_the_queue() -> None:
    queue = Turns()
    held = await queue.take(ONE, "a")
    with trio.move_on_after(0.05):
        await queue.take(OTHER, "b")
    assert queue.waiting == 0
    held.end()
    (await queue.take(OTHER, "c")).end()


async def test_the_wait_is_bounded_and_names_who_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_WITHIN_S", 0.05)
    queue = Turns()
    held = await queue.take(ONE, "process 7")
    with pytest.raises(Busy, match=r"process 7 has had a version of adapter/00 open"):
        await queue.take(OTHER, "process 8")
    held.end()
    (await queue.take(OTHER, "process 8")).end()
