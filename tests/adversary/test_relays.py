"""A seed behind NAT, reached through a relay: strangers' circuits keep no joiner out."""

from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import trio
from arena_kit import FIRST
from kit import checkpoint
from peer_kit import GONE, HostilePeer, Member

from codec.sign import Key
from node.host.port import free_port
from node.settings import keyfile
from node.settings.ticket import Ticket
from scenarios.harness.swarm import Swarm, swarm_in
from swarm.transport.nat.circuit import HOP_ID, HopMessage, Status, peer_in, read_message, write_message

pytestmark = [pytest.mark.slow, pytest.mark.adversary, pytest.mark.alone]

_source: ContextVar[str | None] = ContextVar("_source", default=None)
"""The local address from which tasks started in this context dial."""


@pytest.fixture
def dials_from_source(monkeypatch: pytest.MonkeyPatch) -> None:
    dial = trio.open_tcp_stream

    async def from_source(host: Any, port: Any) -> trio.SocketStream:
        return await dial(host, port, local_address=_source.get())

    monkeypatch.setattr(trio, "open_tcp_stream", from_source)


@pytest.fixture
def relayed(tmp_path: Path) -> Iterator[tuple[Swarm, int, str]]:
    """A swarm of a seed and a relay; the relay's port; a ticket whose only address is a circuit of the relay."""
    with swarm_in(tmp_path) as swarm:
        port = free_port()
        swarm.seed(checkpoint(tmp_path / "base", FIRST), "--via", f"127.0.0.1:{port}", "--announce", "127.0.0.1:9")
        ticket = swarm.ticket("--nodes", "64")
        swarm.start("relay", "relay", ticket, "--listen", f"127.0.0.1:{port}")
        swarm.until("relay", lambda state: state["nodes"][0]["phase"] == "idle")
        swarm.until("seed", lambda state: len(state["nodes"]) == 1)
        yield swarm, port, ticket
        for name in swarm.running:
            assert swarm.running[name].poll() is None, swarm.log(name)
            assert "Traceback" not in swarm.log(name, 1 << 22)


async def hold_circuits(
    hostile: HostilePeer, relay: bytes, port: int, target: bytes, count: int, opened: list[int]
) -> None:
    """Keep `count` silent circuits to the target open: request each again when it ends."""

    async def one() -> None:
        while True:
            try:
                await hostile.transport.connect(relay, [f"/ip4/127.0.0.1/tcp/{port}"])
                stream = await hostile.transport.open_protocol_stream(relay, HOP_ID)
                async with stream:
                    await write_message(stream, HopMessage(type=HopMessage.CONNECT, peer=peer_in(target, None)))
                    answer = await read_message(stream, HopMessage)
                    if answer.status == Status.OK:
                        opened.append(1)
                        while await stream.receive_some(1024):
                            pass
            except GONE:
                pass
            await trio.sleep(0.5)

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)


async def comes_in(ticket: str) -> None:
    joiner = Member(Key.generate(), ticket)
    with trio.move_on_after(15):
        async with joiner.running():
            while not await joiner.enter():  # noqa: ASYNC110
                await trio.sleep(0.2)
        return
    pytest.fail("a machine with a valid ticket was not let in through the relay within 15 s")


@pytest.mark.usefixtures("dials_from_source")
async def test_15_circuits_of_strangers_keep_no_joiner_from_a_seed_behind_nat(relayed: tuple[Swarm, int, str]) -> None:
    """Two keys hold sixteen circuits each, requested again when they end; then twenty keys two each, on five
    addresses."""
    swarm, port, ticket = relayed
    way_in = Ticket.parse(ticket)
    relay = keyfile.load(swarm.home("relay") / "node.key").public
    await comes_in(ticket)
    for keys, each in ((2, 16), (20, 2)):
        opened: list[int] = []
        async with trio.open_nursery() as nursery:
            for i in range(keys):
                _source.set(f"127.1.0.{i % 5 + 1}")
                hostile = HostilePeer(Key(bytes([i + 1, keys]) + b"\x71" * 30))
                await nursery.start(hostile.transport.serve, hostile._accept)
                nursery.start_soon(hold_circuits, hostile, relay, port, way_in.authority, each, opened)
            _source.set(None)
            with trio.move_on_after(10):
                while len(opened) < 16:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            assert opened, "no circuit was opened: the attack did not take place"
            for _ in range(3):
                await comes_in(ticket)
            nursery.cancel_scope.cancel()
