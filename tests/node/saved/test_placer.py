"""The seed's placer among nodes that boast, are slow and refuse, and while a state does not become whole."""

import os
import threading
import time
from pathlib import Path

import pytest
import trio
from saved_kit import Bench, as_kind, bench, until

from codec.errors import UsageError
from node.saved import holder as holding
from node.saved import placement as pauses
from node.saved import placer as placing
from node.saved.conversation import Conversation
from node.saved.folder import ComingFragment
from node.saved.holder import Holder
from node.saved.messages import Done, HeldState, Message, Place, Settle
from node.saved.record import open_record

CONTENT = os.urandom(3_000_000)


def boasting(made: Holder) -> Holder:
    """Says of every state that it has a fragment of that it has all of it."""
    held = made._folder.held
    made._folder.held = lambda: tuple(HeldState(each.record, tuple(range(4))) for each in held())
    return made


class Reluctant(Holder):
    """Takes no fragment of the states of these steps, and does not say so."""

    steps = (2,)

    async def _take(self, conversation: Conversation, asked: Place) -> Message:
        if open_record(asked.record, self._swarm).step in self.steps:
            await trio.sleep_forever()
        return await super()._take(conversation, asked)


async def test_a_node_that_says_it_has_everything_keeps_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "KEEP_LOOK_S", 0.3)
    async with bench(tmp_path, nodes=3) as made:
        boaster = await made.add_node(wrap=boasting)
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
            assert made.counts() == [1, 1, 1, 1]
        async with made.seed() as seed:  # which has all from disk
            await until(lambda: len(seed.addresses) == 4)
            lost = made.nodes[0]
            spare = await made.add_node()
            made.kill(lost)
            lost.has_left = True
            await until(lambda: spare.fragments == lost.fragments)
        assert len(boaster.fragments) == 1


@pytest.mark.slow
async def test_a_node_that_takes_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "PLACE_S", 1.0)
    monkeypatch.setattr(placing, "MIN_BYTES_S", 1e9)
    monkeypatch.setattr(pauses, "AGAIN_S", 0.1)
    async with bench(tmp_path, nodes=2) as made:
        slow = await made.add_node(wrap=as_kind(Reluctant))
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 2, made.tell)
        assert slow.fragments == []
        assert sum(len(node.fragments) for node in made.nodes) == 3


async def test_the_next_state_does_not_wait_for_a_node_that_is_slow_with_this_one(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=2) as made:
        await made.add_node(wrap=as_kind(Reluctant))
        async with made.seed() as seed:
            await made.save_until(seed, CONTENT, 2, lambda: sum(made.counts()) == 2)
            with trio.fail_after(20):  # a part of a fragment alone may take 60 s
                await seed.save(made.file(CONTENT), 3, made.tell)
            await until(lambda: made.counts() == [1, 1, 1])


async def full(made: Bench) -> None:
    for _ in range(2):
        await made.add_node(budget=1000)


async def test_a_state_that_no_node_takes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "STUCK_S", 0.5)
    async with bench(tmp_path, nodes=0) as made, made.seed() as seed:
        await full(made)
        with pytest.raises(UsageError, match=r"No node takes another fragment .*--state-gb"):
            await seed.save(made.file(CONTENT), 1, made.tell)


async def test_a_state_that_no_node_takes_makes_room_for_the_next_one(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=0) as made, made.seed() as seed, trio.open_nursery() as nursery:
        await full(made)
        ended: list[str] = []

        async def first() -> None:
            try:
                await seed.save(made.file(CONTENT), 1, made.tell)
            except UsageError as error:
                ended.append(str(error))

        nursery.start_soon(first)
        await until(lambda: any(stage == "placing" for stage, *_ in made.told))
        small = tmp_path / "small"
        small.write_bytes(b"content")
        await seed.save(small, 2, made.tell)
        assert len(ended) == 1
        assert made.counts() == [1, 1]


async def test_the_last_whole_state_is_kept_while_a_newer_one_does_not_become_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "KEEP_LOOK_S", 0.3)
    async with bench(tmp_path, nodes=3) as made:
        await made.add_node(wrap=as_kind(Reluctant))
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
            await made.save_until(seed, CONTENT, 2, lambda: sum(made.counts()) == 4 + 3)
            lost = made.nodes[0]
            (mine,) = [name for name in lost.fragments if name.startswith(f"{first.record.serial}/")]
            spare = await made.add_node()
            made.kill(lost)
            lost.has_left = True
            await until(lambda: mine in spare.fragments)
            record = made.nodes[1].folder / f"{first.record.serial:016x}" / "record"
            os.utime(record, (1e9, 1e9))
            await until(lambda: record.stat().st_mtime > time.time() - 60)


async def test_when_the_next_state_cannot_be_coded_the_last_whole_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "KEEP_LOOK_S", 0.3)
    async with bench(tmp_path, nodes=3) as made:
        await made.add_node(wrap=as_kind(Reluctant))
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
            await made.save_until(seed, CONTENT, 2, lambda: sum(made.counts()) == 4 + 3)
            with pytest.raises(UsageError, match="Cannot read"):
                await seed.save(tmp_path / "none", 3, made.tell)
            lost = made.nodes[0]
            spare = await made.add_node()
            made.kill(lost)
            lost.has_left = True
            await until(lambda: any(name in spare.fragments for name in lost.fragments))


async def test_coding_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=1) as made, made.seed() as seed:
        told: list[tuple[str, int]] = []
        with trio.CancelScope() as scope:

            def tell(stage: str, done: int, total: int) -> None:
                told.append((stage, done))
                if len(told) == 1:
                    trio.from_thread.run_sync(scope.cancel)

            await seed.save(made.file(CONTENT), 1, tell)
        assert scope.cancelled_caught
        assert ("coding", len(CONTENT)) not in told
        assert os.listdir(tmp_path / "seed") == []


async def test_a_node_has_time_to_hash_what_it_has_and_answers_others_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "ANSWER_S", 0.2)
    monkeypatch.setattr(placing, "DISK_BYTES_S", len(CONTENT) / 30)
    resume, go = ComingFragment.resume, threading.Event()

    def slow(coming: ComingFragment) -> None:
        go.wait(20)
        resume(coming)

    monkeypatch.setattr(ComingFragment, "resume", slow)
    async with bench(tmp_path, nodes=1) as made, made.seed() as seed, trio.open_nursery() as nursery:
        nursery.start_soon(seed.save, made.file(CONTENT), 1, made.tell)
        await until(lambda: any(stage == "placing" for stage, *_ in made.told))
        await trio.sleep(1.0)
        with trio.fail_after(5):
            async with seed._talking(made.roster().members[0]) as conversation:
                await conversation.ask(Settle(1), Done)
        go.set()
        await until(lambda: len(made.nodes[0].fragments) == 1)


async def test_what_nobody_asks_for_goes_from_a_node_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "EXPIRED_LOOK_S", 0.1)
    async with bench(tmp_path, nodes=1) as made:
        async with made.seed() as seed:
            state = await seed.save(made.file(CONTENT), 1, made.tell)
        node = made.nodes[0]
        made.nursery.start_soon(node.holder.drop_expired)
        await trio.sleep(0.5)
        assert len(node.fragments) == 1
        os.utime(node.folder / f"{state.record.serial:016x}" / "record", (1e9, 1e9))
        await until(lambda: node.fragments == [])
