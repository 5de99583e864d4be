"""Machines of a council over real sockets, in one process."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from codec.sign import Key
from node.council.changes import encode_change
from node.council.journal import Journal
from node.council.kept import kept_in
from node.council.service import CouncilService, LeadLost
from node.host.port import free_port
from node.ledger.book import Book
from node.settings.council import CouncilAddress
from swarm.protocol.council.messages import HandOver, encode
from swarm.protocol.council.timing import Timing
from swarm.transport.base import Lane, Stream
from swarm.transport.libp2p import Libp2pTransport

FAST = Timing(lease_s=1.5, beat_s=0.15, jitter_s=0.3, resend_s=0.5)


class Machines:
    """Three machines; each can be started and stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = {name: Key.generate() for name in "ABC"}
        self.addresses = [CouncilAddress(key.public, f"/ip4/127.0.0.1/tcp/{free_port()}") for key in self.keys.values()]
        self.running: dict[str, CouncilService] = {}
        self._scopes: dict[str, trio.CancelScope] = {}

    async def start(self, nursery: trio.Nursery, *names: str) -> None:
        for name in names:
            home = self.folder / name
            home.mkdir(exist_ok=True)
            journal = Journal(home, Book(home / "ledger.sqlite"))
            if name == "A" and journal.is_new:
                journal.found({"boot": b"1"})
            service = CouncilService(home, self.keys[name], self.addresses, journal, FAST)
            self._scopes[name] = await nursery.start(self._run, service)
            self.running[name] = service

    @staticmethod
    async def _run(service: CouncilService, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                task_status.started(scope)

    def stop(self, name: str) -> None:
        self._scopes.pop(name).cancel()
        del self.running[name]

    def leaders(self) -> list[str]:
        return [name for name, service in self.running.items() if service.is_leading]

    async def leader(self) -> str:
        await until(lambda: bool(self.leaders()))
        (found,) = self.leaders()
        return found


async def until(met: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not met():  # noqa: ASYNC110 - what other tasks do sets no event
            await trio.sleep(0.02)


@asynccontextmanager
async def council(folder: Path) -> AsyncIterator[tuple[Machines, trio.Nursery]]:
    machines = Machines(folder)
    async with trio.open_nursery() as nursery:
        await machines.start(nursery, "A", "B", "C")
        yield machines, nursery
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_what_a_leader_establishes_is_with_the_next_one(tmp_path: Path) -> None:
    async with council(tmp_path) as (machines, nursery):
        first = await machines.leader()
        for number in range(20):
            body = encode_change(records=[(f"grant/{number}", bytes(1000))])
            await machines.running[first].establish(body)
        machines.stop(first)
        second = await machines.leader()
        assert second != first
        records = machines.running[second].journal.records()
        assert {f"grant/{number}" for number in range(20)} <= records.keys()
        assert records["boot"] == b"1", "of the machine that founded the council"
        await machines.running[second].establish(encode_change(records=[("boot", b"2")]))
        await machines.start(nursery, first)
        await until(lambda: machines.running[first].journal.last == machines.running[second].journal.last)
        assert machines.running[first].journal.records()["boot"] == b"2"


@pytest.mark.slow
async def test_a_leader_without_a_majority_establishes_nothing_and_stops(tmp_path: Path) -> None:
    async with council(tmp_path) as (machines, _):
        first = await machines.leader()
        service = machines.running[first]
        for name in set("ABC") - {first}:
            machines.stop(name)
        with trio.fail_after(10), pytest.raises(LeadLost):
            await service.establish(encode_change(records=[("boot", b"2")]))
        assert not service.is_leading
        assert await service.wait_lost()
        with pytest.raises(LeadLost):
            await service.establish(b"")


async def test_a_standby_takes_over_on_request(tmp_path: Path) -> None:
    async with council(tmp_path) as (machines, nursery):
        first = await machines.leader()
        other = next(name for name in "ABC" if name != first)

        async def serve() -> None:
            await machines.running[first].wait_lost()
            await machines.running[first].resign()

        nursery.start_soon(serve)
        await machines.running[first].establish(encode_change(records=[("boot", b"2")]))
        with trio.fail_after(20):
            await machines.running[other].take_over()
            await machines.running[other].wait_leading()
        assert machines.running[other].journal.records()["boot"] == b"2"
        assert not machines.running[first].is_leading


@pytest.mark.slow
async def test_a_version_waits_until_a_standby_holds_it(tmp_path: Path) -> None:
    async with council(tmp_path) as (machines, _):
        first = await machines.leader()
        other = next(name for name in "ABC" if name != first)
        held = trio.Event()

        async def holds(sealed: bytes) -> bool:
            assert sealed == b"manifest"
            return held.is_set()

        machines.running[other].holds = holds
        with trio.move_on_after(0.8) as waited:
            await machines.running[first].wait_until_held(b"manifest", "0.1")
        assert waited.cancelled_caught
        held.set()
        with trio.fail_after(10):
            await machines.running[first].wait_until_held(b"manifest", "0.1")


async def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    async with council(tmp_path) as (machines, nursery):
        first = await machines.leader()
        stranger = Libp2pTransport(Key.generate(), ("/ip4/127.0.0.1/tcp/0",))
        await nursery.start(stranger.serve, no_streams)
        target = machines.addresses["ABC".index(first)]
        await stranger.connect(target.key, [target.address])
        stream = await stranger.open_stream(target.key, Lane.CONTROL)
        await stream.send_all(encode(HandOver(1)))
        with trio.fail_after(10):
            assert await answer(stream) == b""
        await trio.sleep(0.3)
        service = machines.running[first]
        assert service.is_leading or "lease" in await service.wait_lost(), "nobody has asked it to hand over"


async def answer(stream: Stream) -> bytes:
    """What comes first; nothing if the stream ends or breaks."""
    try:
        return await stream.receive_some(1)
    except trio.BrokenResourceError:
        return b""


async def no_streams(*_: object) -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.slow
async def test_a_kept_file_comes_to_every_machine(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    (tmp_path / "optimizer.pt").write_bytes(data)
    async with council(tmp_path) as (machines, nursery):
        first = await machines.leader()
        late = next(name for name in "ABC" if name != first)
        machines.stop(late)
        service = machines.running[first]
        for content in (b"first", data):
            (tmp_path / "optimizer.pt").write_bytes(content)
            kept = service.kept.add(tmp_path / "optimizer.pt", "optimizer")
            with trio.fail_after(20):
                await service.keep(kept)
        await machines.start(nursery, late)
        await until(lambda: all(each.kept.has(kept) for each in machines.running.values()))
        await until(lambda: kept_in(machines.running[late].journal.records()) == [kept])
        machines.running[late].kept.copy_out(kept, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == data
        assert [path.name for path in (tmp_path / first / "kept" / "optimizer").iterdir()] == [kept.digest.hex()]


@pytest.mark.slow
async def test_a_leader_keeps_only_what_a_majority_takes(tmp_path: Path) -> None:
    async with council(tmp_path) as (machines, _):
        first = await machines.leader()
        service = machines.running[first]
        kept = service.kept.add(Path(__file__), "optimizer")
        for name in set("ABC") - {first}:
            machines.stop(name)
        with trio.fail_after(10), pytest.raises(LeadLost):
            await service.keep(kept)
        assert kept_in(service.journal.records()) == []
