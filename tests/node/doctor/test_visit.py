"""The visit of the swarm with a seed that misbehaves: each step ends, nothing is raised, and the facts say so."""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from codec.sign import Key
from node.doctor import visit as visiting
from node.doctor.facts import VisitFacts
from node.doctor.visit import visit
from node.settings.config import JoinConfig
from node.settings.ticket import Ticket
from swarm.protocol.core.documents import AuthorityTime, Capability, Grant, Heartbeat, seal
from swarm.protocol.core.wire import Bye, Join, Ping, Pong, Refused, Welcome
from swarm.runtime.framing import ByteReader, Patience, frame_message, read_message
from swarm.transport.base import Lane, PeerKey, Stream
from swarm.transport.libp2p import Libp2pTransport

SEED = Key(b"s" * 32)
VISITOR = Key(b"v" * 32)
Serve = Callable[[Stream], Awaitable[None]]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "STEP_S", "RATE_S", "DIAL_BACK_S", "LEAVE_S"):
        monkeypatch.setattr(visiting, name, 1.0)


async def visited(serve: Serve, home: Path) -> VisitFacts:
    """The facts of a visit to a seed that serves each control stream with `serve`."""
    seed = Libp2pTransport(SEED, ["/ip4/127.0.0.1/tcp/0"])

    async def accept(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        if lane is Lane.CONTROL:
            await serve(stream)

    capability = seal(Capability(SEED.public, os.urandom(16), AuthorityTime(time.time() + 60), 1, 0), SEED)
    async with trio.open_nursery() as nursery:
        addrs = await nursery.start(seed.serve, accept)
        ticket = Ticket(SEED.public, tuple(addrs), capability, "loopback")
        config = JoinConfig(home=home, engine="none", listen=("127.0.0.1:0",))
        with trio.fail_after(30):
            facts = await visit(ticket, config, VISITOR)
        nursery.cancel_scope.cancel()
    return facts


def welcome(*, signer: Key = SEED, peer: Key = VISITOR, manifest: bytes = b"") -> bytes:
    grant = seal(Grant(SEED.public, peer.public, 0, 1, AuthorityTime(time.time()), bytes(16)), signer)
    beat = Heartbeat(SEED.public, 1, 1, AuthorityTime(time.time() - 3600), 0, 0, 0, b"", b"")
    return frame_message(Welcome(grant, b"", seal(beat, signer), manifest))


async def silent(stream: Stream) -> None:
    await trio.sleep_forever()


async def closing(stream: Stream) -> None:
    await stream.receive_some(1)


def saying(data: bytes) -> Serve:
    async def say(stream: Stream) -> None:
        await stream.receive_some(1)
        await stream.send_all(data)
        await trio.sleep_forever()

    return say


@pytest.mark.parametrize(
    "serve",
    [silent, closing, saying(b"\xff" * 64), saying(b"\4\0\0\0rubb"), saying(welcome(signer=Key(b"x" * 32))),
     saying(welcome(peer=Key(b"o" * 32)))],
    ids=["silent", "closing", "too long", "rubbish", "forged", "another's grant"],
)  # fmt: skip
async def test_a_seed_that_does_not_welcome(serve: Serve, tmp_path: Path) -> None:
    facts = await visited(serve, tmp_path)
    assert (facts.connected, facts.welcomed, facts.refused) == (True, False, "")
    assert facts.connect_error


async def test_a_refusal_is_passed_on(tmp_path: Path) -> None:
    facts = await visited(saying(frame_message(Refused("ticket", "Its machines are all there."))), tmp_path)
    assert (facts.refused, facts.welcomed) == ("Its machines are all there.", False)


@pytest.mark.parametrize("manifest", [b"", b"rubbish" * 20], ids=["no version", "rubbish"])
@pytest.mark.slow
async def test_a_seed_that_falls_silent_after_its_welcome(manifest: bytes, tmp_path: Path) -> None:
    facts = await visited(saying(welcome(manifest=manifest)), tmp_path)
    assert facts.welcomed
    assert facts.own_time is not None
    assert facts.seed_time is not None
    assert 3590 < facts.own_time - facts.seed_time < 3610
    assert (facts.rtt_ms, facts.model_bytes, facts.dialable) == (None, None, None)
    assert facts.rate.error


async def test_a_seed_that_answers_other_pings(tmp_path: Path) -> None:
    """It says something before each deadline for a message has passed, but never what was asked."""

    async def babble(stream: Stream) -> None:
        await stream.receive_some(1)
        await stream.send_all(welcome())
        while True:
            await trio.sleep(0.3)
            await stream.send_all(frame_message(Pong(77)))

    facts = await visited(babble, tmp_path)
    assert (facts.welcomed, facts.rtt_ms, facts.rate.error) == (True, None, "too slow")


async def test_a_seed_whose_every_step_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step may end in time; the visit as a whole ends, too, and releases its lease."""
    monkeypatch.setattr(visiting, "VISIT_S", 1.0)
    for name in ("STEP_S", "RATE_S", "DIAL_BACK_S"):
        monkeypatch.setattr(visiting, name, 60.0)
    heard: list[object] = []

    async def slow(stream: Stream) -> None:
        reader = ByteReader(stream)
        while (read := await read_message(reader, Patience(10.0))) is not None:
            heard.append(type(read[0]))
            if heard[-1] is Join:
                await stream.send_all(welcome())

    facts = await visited(slow, tmp_path)
    assert facts.welcomed
    assert heard == [Join, Ping, Bye]
