"""Placing with nodes and fetching from them, over real transports on loopback, with nodes that die, refuse and lie."""

import os
import shutil
import time
from pathlib import Path

import pytest
import trio
from saved_kit import ANY, KEY, OTHER, Bench, as_kind, bench, idle, until

from codec.errors import PeerError, UsageError
from node.saved import placer as placing
from node.saved.conversation import STATE_PROTOCOL, Conversation, Declined
from node.saved.holder import Holder
from node.saved.messages import AskHeld, Body, Done, Fetch, Held, Message, Place, Settle, Show, seal_pass
from node.saved.rescue import FetchedState, Wanted, fetch_from_nodes
from swarm.transport.base import Unreachable
from swarm.transport.libp2p import Libp2pTransport

CONTENT = os.urandom(20_000_000)


def read(path: Path) -> bytes:
    return path.read_bytes()


async def fetched(made: Bench, out: Path, *nodes: int, key=KEY) -> FetchedState:
    addresses = tuple(made.nodes[number].addrs[0] for number in nodes)
    _, state = await fetch_from_nodes(key, addresses, Wanted(None, out))
    assert state is not None
    return state


async def test_a_state_comes_back_after_half_of_the_nodes_and_the_seed_are_lost(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            state = await seed.save(made.file(CONTENT), 17, made.tell)
        assert made.counts() == [1, 1, 1, 1]
        assert (state.record.needed, state.record.total) == (2, 4)
        assert {stage for stage, *_ in made.told} == {"coding", "placing"}
        shutil.rmtree(tmp_path / "seed")
        made.kill(made.nodes[1])
        made.kill(made.nodes[2])
        found = await fetched(made, tmp_path / "out", 3)
        assert read(tmp_path / "out") == CONTENT
        assert found.record == state.record
        assert os.stat(tmp_path / "out").st_mode & 0o077 == 0
        assert not any(name.startswith(".out") for name in os.listdir(tmp_path)), "nothing is left beside it"
        with pytest.raises(UsageError, match="exists already"):
            await fetched(made, tmp_path / "out", 3)


async def test_an_interrupted_fetch_goes_on_where_it_ended(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            state = await seed.save(made.file(CONTENT), 17, made.tell)
        told: list[int] = []
        addresses = (made.nodes[0].addrs[0],)
        with trio.CancelScope() as scope:

            def tell(what: str, done: int, total: int) -> None:
                told.append(done)
                if done >= state.record.segment_bytes:
                    scope.cancel()

            await fetch_from_nodes(KEY, addresses, Wanted(None, tmp_path / "out"), tell)
        assert scope.cancelled_caught
        assert not (tmp_path / "out").exists()
        told.clear()
        await fetch_from_nodes(
            KEY, addresses, Wanted(None, tmp_path / "out"), lambda what, done, total: told.append(done)
        )
        assert max(told[:2]) >= state.record.segment_bytes
        assert read(tmp_path / "out") == CONTENT


async def test_with_too_few_nodes_it_says_so_and_goes_on_later(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 17, made.tell)
        for node in made.nodes[1:]:
            made.kill(node)
        with pytest.raises(UsageError, match="do not have enough"):
            await fetched(made, tmp_path / "out", 0)
        await made.start(made.nodes[2])
        await fetched(made, tmp_path / "out", 0)
        assert read(tmp_path / "out") == CONTENT


class Slow(Holder):
    """Takes no fragment before `go` is set."""

    go: trio.Event

    async def _take(self, conversation: Conversation, asked: Place) -> Message:
        await self.go.wait()
        return await super()._take(conversation, asked)


async def with_slow_node(made: Bench) -> Slow:
    holder = (await made.add_node(wrap=as_kind(Slow))).holder
    assert isinstance(holder, Slow)
    holder.go = trio.Event()
    return holder


async def test_a_new_state_replaces_the_old_one_only_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "KEEP_LOOK_S", 0.3)
    async with bench(tmp_path, nodes=3) as made:
        slow = await with_slow_node(made)
        slow.go.set()
        async with made.seed() as seed:
            first = await seed.save(made.file(b"first" * 1000), 1, made.tell)
            slow.go = trio.Event()
            await made.save_until(seed, b"second" * 1000, 2, lambda: made.counts() == [2, 2, 2, 1])
            found = await fetched(made, tmp_path / "one", 1)
            assert read(tmp_path / "one") == b"second" * 1000, "half of a new one is enough, if it is there"
            made.kill(made.nodes[0])
            made.kill(made.nodes[2])
            found = await fetched(made, tmp_path / "two", 1)
            assert read(tmp_path / "two") == b"first" * 1000
            assert (found.record, found.newest.step) == (first.record, 2)
            await made.start(made.nodes[0])
            await made.start(made.nodes[2])
            slow.go.set()
            await until(lambda: all(len(node.fragments) == 1 for node in made.nodes))
            await fetched(made, tmp_path / "three", 3)
            assert read(tmp_path / "three") == b"second" * 1000


async def test_a_restarted_seed_goes_on_placing(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=2) as made:
        slow = await with_slow_node(made)
        async with made.seed() as seed:
            await made.save_until(seed, CONTENT, 5, lambda: made.counts() == [1, 1, 0])
        slow.go.set()
        async with made.seed():
            await until(lambda: os.path.exists(tmp_path / "seed" / "whole"))
        assert made.counts() == [1, 1, 1]
        await fetched(made, tmp_path / "out", 2)
        assert read(tmp_path / "out") == CONTENT


async def test_a_lost_nodes_fragment_is_placed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "KEEP_LOOK_S", 0.3)
    async with bench(tmp_path) as made, made.seed() as seed:
        await seed.save(made.file(b"content"), 1, made.tell)
        spare = await made.add_node()
        made.kill(made.nodes[0])
        made.nodes[0].has_left = True
        await until(lambda: bool(spare.fragments))


async def test_a_node_with_another_disk_gets_its_fragment_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "KEEP_LOOK_S", 0.3)
    async with bench(tmp_path) as made, made.seed() as seed:
        await seed.save(made.file(b"content"), 1, made.tell)
        node = made.nodes[1]
        made.kill(node)
        shutil.rmtree(node.folder)
        node.holder = made.holder_at(node.folder)
        await made.start(node)
        await until(lambda: bool(node.fragments))


class Liar(Holder):
    """Gives other bytes than it holds."""

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        found = self._folder.open_segment(asked.serial, asked.fragment, asked.segment)
        assert found is not None
        found[0].close()
        await conversation.send(Body(found[1]))
        await conversation.send_part(bytes(found[1]))


class Silent(Holder):
    """Ends the conversation where a segment is due."""

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        raise PeerError("no")


@pytest.mark.parametrize("kind", [Liar, Silent])
async def test_a_holder_that_lies_is_found_out_and_another_one_is_asked(tmp_path: Path, kind: type[Holder]) -> None:
    async with bench(tmp_path, nodes=2) as made:
        for _ in range(2):
            await made.add_node(wrap=as_kind(kind))
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
        await fetched(made, tmp_path / "out", 2)
        assert read(tmp_path / "out") == CONTENT


@pytest.mark.slow
async def test_when_too_many_lie_nothing_is_written(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=1) as made:
        for _ in range(3):
            await made.add_node(wrap=as_kind(Liar))
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
        with pytest.raises(UsageError, match=r"give [01] of the 2 fragments"):
            await fetched(made, tmp_path / "out", 0)
        assert not (tmp_path / "out").exists()


async def test_a_node_without_room_is_passed_over(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=2) as made:
        small = await made.add_node(budget=1000)
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
        assert small.fragments == []
        assert sum(len(node.fragments) for node in made.nodes) == 3
        await fetched(made, tmp_path / "out", 2)
        assert read(tmp_path / "out") == CONTENT


async def test_without_nodes_nothing_is_saved(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=0) as made, made.seed() as seed:
        with pytest.raises(UsageError, match="No node is there"):
            await seed.save(made.file(b"content"), 1, made.tell)


async def test_another_key_gets_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=2) as made:
        async with made.seed() as seed:
            await seed.save(made.file(b"content"), 1, made.tell)
        with pytest.raises(Unreachable, match="signature"):
            await fetched(made, tmp_path / "out", 0, 1, key=OTHER)


async def test_only_the_seed_places_and_only_a_pass_opens(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=1) as made:
        node = made.nodes[0]
        async with made.seed() as seed:
            state = await seed.save(made.file(b"content"), 1, made.tell)
        stranger = Libp2pTransport(OTHER, ANY)
        async with trio.open_nursery() as nursery:
            await nursery.start(stranger.serve, idle)
            await stranger.connect(node.key.public, node.addrs)

            async def talk() -> Conversation:
                return Conversation(await stranger.open_bulk_stream(node.key.public, STATE_PROTOCOL))

            now = time.time()
            for first in (AskHeld(), Place(state.sealed, 0, 0), Settle(99)):
                with pytest.raises((PeerError, trio.BrokenResourceError, AttributeError)):
                    await (await talk()).ask(first, Held | Done)
            for bad, why in (
                (seal_pass(OTHER, OTHER.public, now + 60), "signature"),
                (seal_pass(KEY, KEY.public, now + 60), "another process"),
                (seal_pass(KEY, OTHER.public, now - 1), "expired"),
                (b"", "signature"),
            ):
                with pytest.raises(Declined, match=why):
                    await (await talk()).ask(Show(bad), Done)
            conversation = await talk()
            await conversation.ask(Show(seal_pass(KEY, OTHER.public, now + 60)), Done)
            held = await conversation.ask(AskHeld(), Held)
            assert held.states[0].fragments == (0,)
            for number in (1, 7):
                with pytest.raises(Declined, match="not here"):
                    await conversation.ask(Fetch(state.record.serial, number, 0), Body)
            with pytest.raises((PeerError, trio.BrokenResourceError)):
                await conversation.ask(Place(state.sealed, 0, 0), Done)
            nursery.cancel_scope.cancel()
        assert node.fragments == [f"{state.record.serial}/0"]


async def test_a_trainers_file_that_goes_while_the_seed_looks_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / ".coming-gone").symlink_to(tmp_path / "none")  # listed, and without a status
    async with bench(tmp_path, nodes=1) as made, made.seed() as seed:
        await seed.save(made.file(b"content"), 1, made.tell)
