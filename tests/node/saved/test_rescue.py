"""A machine that fetches without a seed, among nodes that lie about others, about states, and drip."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from saved_kit import KEY, Bench, bench, coded

from node.saved import fetching, rescue
from node.saved.coding import CodedState, join_file
from node.saved.conversation import Conversation
from node.saved.holder import Holder
from node.saved.messages import Body, Fetch, HeldState
from node.saved.rescue import FetchedState, Wanted, fetch_from_nodes
from swarm.protocol.membership.roster import Member

CONTENT = os.urandom(3_000_000)
DEAD = "/ip4/127.0.0.1/tcp/1"


async def fetched(made: Bench, out: Path, *nodes: int) -> FetchedState:
    addresses = tuple(made.nodes[number].addrs[0] for number in nodes)
    _, state = await fetch_from_nodes(KEY, addresses, Wanted(None, out))
    assert state is not None
    return state


def seeing(roster: Callable[[], Any], pause_s: float = 0.0) -> Callable[[Holder], Holder]:
    """A node with another roster, which it tells after a while."""

    class Seeing(Holder):
        async def _converse(self, conversation: Conversation, *, is_seed: bool) -> None:
            await trio.sleep(0.0 if is_seed else pause_s)
            await super()._converse(conversation, is_seed=is_seed)

    return lambda made: Seeing(made._swarm, made._folder, made._replica, roster)


async def test_wrong_addresses_do_not_keep_nodes_out(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=2) as made:

        def dead() -> Any:
            """The honest nodes under an address at which nothing answers, and many nodes that there are not."""
            others = [bytes([number]) * 32 for number in range(1, 47)]
            peers = [*(node.key.public for node in made.nodes[:2]), *others]
            return SimpleNamespace(
                members=[Member(at, peer, (DEAD,), True, "", "", 1.0, False) for at, peer in enumerate(peers)]
            )

        await made.add_node(wrap=seeing(dead))
        await made.add_node(wrap=seeing(made.roster, pause_s=0.3))
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
        made.kill(made.nodes[0])
        made.nodes[2].holder._folder.held = lambda: ()  # it gives nothing, and names the others wrongly
        found = await fetched(made, tmp_path / "out", 2, 3)
        assert (tmp_path / "out").read_bytes() == CONTENT
        assert found.record.step == 1


class Dripping(Holder):
    """Gives a byte now and then of the segments of one state, which it says it has."""

    state: CodedState

    async def _give_segment(self, conversation: Conversation, asked: Fetch) -> None:
        if asked.serial != self.state.record.serial:
            await super()._give_segment(conversation, asked)
        else:
            await conversation.send(Body(self.state.record.bytes_of_segment(asked.segment)))
            await drip(conversation)


async def drip(conversation: Conversation) -> None:
    while True:
        await conversation.send_part(b"x")
        await trio.sleep(0.05)


async def test_a_node_that_drips_leads_to_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SEGMENT_S", 1.0)
    monkeypatch.setattr(fetching, "MIN_BYTES_S", 1e9)
    newer = coded(tmp_path, CONTENT, serial=1 << 62)

    def dripping(made: Holder) -> Holder:
        holder = Dripping(made._swarm, made._folder, made._replica, made._roster)
        holder.state = newer
        held = made._folder.held
        made._folder.held = lambda: (HeldState(newer.sealed, (0, 1, 2, 3)), *held())
        return holder

    async with bench(tmp_path, nodes=2) as made:
        await made.add_node(wrap=dripping)
        async with made.seed() as seed:
            first = await seed.save(made.file(CONTENT), 1, made.tell)
        found = await fetched(made, tmp_path / "out", 0)
        assert found.record == first.record
        assert (tmp_path / "out").read_bytes() == CONTENT


async def test_decrypting_ends_when_it_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = trio.CancelScope()

    def joining(*arguments: Any) -> None:
        trio.from_thread.run_sync(scope.cancel)
        join_file(*arguments)

    monkeypatch.setattr(rescue, "join_file", joining)
    async with bench(tmp_path, nodes=2) as made:
        async with made.seed() as seed:
            await seed.save(made.file(CONTENT), 1, made.tell)
        with scope:
            await fetched(made, tmp_path / "out", 0)
        assert scope.cancelled_caught
        assert not (tmp_path / "out").exists()
