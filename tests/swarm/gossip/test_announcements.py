import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
import trio.testing
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from libp2p.utils.varint import encode_uvarint

from codec.errors import PeerError
from codec.sign import Key
from swarm import guard
from swarm.gossip.announcements import MAX_MESSAGE_BYTES, Gossip
from swarm.transport.base import Lane, PeerKey, Transport, Unreachable
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.pubsub import BoundedPubsub, Neighbours, cost_of, trimmed
from swarm.transport.rules import PeerPolicy


async def idle(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
    await trio.sleep_forever()


def valid(data: bytes) -> bool:
    return not data.startswith(b"bad")


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


class Member:
    def __init__(self, transport: Transport, announcer: Gossip) -> None:
        self.transport = transport
        self.announcer = announcer
        self.got: list[bytes] = []

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.announcer.run(self.got.append, task_status=task_status)


def libp2p_member(number: int, validate: Callable[[bytes], bool] = valid, policy: PeerPolicy | None = None) -> Member:
    transport = Libp2pTransport(Key(bytes([number + 1]) * 32), ["/ip4/127.0.0.1/tcp/0"], policy=policy)
    return Member(transport, Gossip(transport, "/test", validate))


@asynccontextmanager
async def chain(count: int, make: Callable[[int], Member]) -> AsyncIterator[list[Member]]:
    """Members, each of which is connected to the one before it."""
    members = [make(number) for number in range(count)]
    async with trio.open_nursery() as nursery:
        for index, member in enumerate(members):
            addrs = await nursery.start(member.transport.serve, idle)
            if index + 1 < count:
                next_ = members[index + 1]
                nursery.start_soon(_connect_when_serving, next_.transport, member.transport.key, addrs)
        await until(lambda: all(member.transport.peers() for member in members))
        for member in members:
            await nursery.start(member.run)
        yield members
        nursery.cancel_scope.cancel()


async def _connect_when_serving(transport: Transport, peer: PeerKey, addrs: list[str]) -> None:
    while not transport.peers():
        try:
            await transport.connect(peer, addrs)
        except Unreachable:
            await trio.sleep(0.05)


async def reaches(near: Member, far: Member) -> None:
    """Publish at `near` until a message reaches `far`."""
    knock, number = os.urandom(8), 0
    while not any(text.startswith(knock) for text in far.got):
        number += 1
        await near.announcer.publish(b"%s %d" % (knock, number))
        await trio.sleep(0.1)


async def settle(members: list[Member]) -> None:
    """Wait until an announcement of the first member reaches the last: the mesh is built."""
    await reaches(members[0], members[-1])
    await trio.sleep(0.2)
    for member in members:
        member.got.clear()


async def test_valid_messages_are_delivered_once_and_invalid_ones_never() -> None:
    with trio.fail_after(20):
        async with chain(4, libp2p_member) as members:
            await settle(members)
            await members[0].announcer.publish(b"news")
            await members[1].announcer.publish(b"bad")  # its neighbours validate it; the sender does not
            await members[3].announcer.publish(b"more")
            await members[0].announcer.publish(b"news")  # again: it is not delivered twice
            await until(lambda: all(len(member.got) == 2 for member in members[1:3]))
            await trio.sleep(0.3)
            assert [sorted(member.got) for member in members] == [
                [b"more"],
                [b"more", b"news"],
                [b"more", b"news"],
                [b"news"],
            ]
            assert all(member.announcer.has_seen(b"news") for member in members)  # so that no member announces it again
            assert not any(member.announcer.has_seen(b"bad") for member in members[2:])


async def test_invalid_messages_are_not_forwarded() -> None:
    """The last member would accept the message, but the member between them validates before it forwards."""

    def member(number: int) -> Member:
        return libp2p_member(number, valid if number == 1 else bool)

    with trio.fail_after(20):
        async with chain(3, member) as members:
            await settle(members)
            for text in (b"bad news", b"news", b"bad end", b"end"):
                await members[0].announcer.publish(text)
            await until(lambda: b"end" in members[2].got and b"news" in members[2].got)
            assert {text for member in members for text in member.got} == {b"news", b"end"}


async def test_oversized_messages_are_dropped_and_gossip_goes_on() -> None:
    """From a neighbour that ignores all limits, to a validator that accepts everything."""
    with trio.fail_after(30):
        async with chain(3, partial(libp2p_member, validate=bool)) as members:
            await settle(members)
            liar = members[0].announcer
            assert liar._pubsub is not None
            await liar._pubsub.publish("/test", bytes(MAX_MESSAGE_BYTES + 1))
            await reaches(members[0], members[2])
            await liar._pubsub.publish("/test", bytes(5 * MAX_MESSAGE_BYTES))  # more than a frame of GossipSub
            for near, far in (members[1:], members[:0:-1]):  # the liar may have been disconnected
                await reaches(near, far)
            assert max(len(text) for member in members for text in member.got) < 100


@pytest.mark.slow
async def test_without_a_grant_there_is_no_gossip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gossip.announcements._GREET_S", 0.1)
    granted: set[PeerKey] = set()
    member, stranger = libp2p_member(0, policy=PeerPolicy(admits=granted.__contains__)), libp2p_member(1)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for each in (member, stranger):
                addrs = await nursery.start(each.transport.serve, idle)
                await nursery.start(each.run)
            await member.transport.connect(stranger.transport.key, addrs)
            await settle([member, stranger])  # the peer that the member dialed gossips
            await member.transport.disconnect(stranger.transport.key)
            await until(lambda: not stranger.transport.peers())
            addrs = [str(address) for address in member.transport.host.get_addrs()]  # type: ignore[attr-defined]
            await stranger.transport.connect(member.transport.key, [addrs[0].partition("/p2p/")[0]])
            for turn in range(10):  # through many greeting intervals
                await member.announcer.publish(b"for members %d" % turn)
                await stranger.announcer.publish(b"from a stranger %d" % turn)
                await trio.sleep(0.1)
            assert member.got == [] == stranger.got
            granted.add(stranger.transport.key)
            await settle([member, stranger])
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("size", [1, 1000, MAX_MESSAGE_BYTES])
async def test_sizes(size: int) -> None:
    with trio.fail_after(20):
        async with chain(2, libp2p_member) as members:
            await settle(members)
            data = os.urandom(size - 1) + b"!"
            await members[0].announcer.publish(data)
            await until(lambda: members[1].got == [data])
            with pytest.raises(ValueError, match="at most"):
                await members[0].announcer.publish(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.slow
async def test_a_burst_is_delivered_whole() -> None:
    with trio.fail_after(20):
        async with chain(3, libp2p_member) as members:
            await settle(members)
            sent = [b"%d" % number * 100 for number in range(300)]
            for data in sent:
                await members[0].announcer.publish(data)
            await until(lambda: len(members[2].got) == 300)
            assert sorted(members[2].got) == sorted(sent)


async def test_a_lost_mesh_is_rebuilt_within_seconds_however_healthy_the_library_finds_it() -> None:
    """The library would stretch the heartbeat to a minute in a small or quiet swarm, which it takes for a sick one."""
    with trio.fail_after(20):
        async with chain(2, libp2p_member) as members:
            await settle(members)
            routers = [member.announcer._pubsub.router for member in members]  # type: ignore[union-attr]
            for router in routers:
                router.network_health_score = 0.0
            for _ in range(2):  # the first heartbeat after that would set the interval, and the second be late
                for router in routers:
                    router.mesh["/test"].clear()
                await until(lambda: all(router.mesh["/test"] for router in routers), within_s=8)


async def test_not_running() -> None:
    with pytest.raises(Unreachable, match="not gossiping"):
        await libp2p_member(0).announcer.publish(b"x")
    with pytest.raises(Unreachable, match="that serves"):
        await libp2p_member(0).run()


async def test_after_gossip_ends_peers_still_connect() -> None:
    a, b = libp2p_member(0), libp2p_member(1)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            addrs = await nursery.start(a.transport.serve, idle)
            await nursery.start(b.transport.serve, idle)
            async with trio.open_nursery() as gossiping:
                await gossiping.start(a.run)
                await gossiping.start(b.run)
                gossiping.cancel_scope.cancel()
            await b.transport.connect(a.transport.key, addrs)
            assert a.transport.peers() == [b.transport.key]
            nursery.cancel_scope.cancel()


# Hostile neighbours.

TOPIC = "/test"


def signed(key: Key, data: bytes) -> rpc_pb2.Message:
    """A message signed by `key` as GossipSub signs it."""
    message = rpc_pb2.Message(data=data, topicIDs=[TOPIC], from_id=id_of(key.public).to_bytes(), seqno=bytes(8))
    message.signature = create_new_key_pair(key.seed).private_key.sign(
        PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString()
    )
    return message


def id_of(peer: PeerKey) -> ID:
    return Libp2pTransport.id_of(peer)


def a_frame() -> rpc_pb2.RPC:
    """A frame with all kinds of fields."""
    rpc = rpc_pb2.RPC(publish=[signed(Key(bytes([5]) * 32), b"hear, hear")], senderRecord=b"whatever")
    rpc.subscriptions.add(subscribe=True, topicid=TOPIC)
    rpc.control.ihave.add(topicID=TOPIC, messageIDs=[bytes(32)])
    rpc.control.iwant.add(messageIDs=[bytes(32)])
    rpc.control.graft.add(topicID=TOPIC)
    rpc.control.prune.add(topicID=TOPIC, backoff=60, peers=[rpc_pb2.PeerInfo(peerID=bytes(38))])
    return rpc


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    edit = st.tuples(st.integers(0, len(valid)), st.integers(0, 4), st.binary(max_size=4))

    def change(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = bytearray(valid)
        for at, length, put in edits:
            data[at : at + length] = put
        return bytes(data)

    return st.lists(edit, min_size=1, max_size=5).map(change)


@given(st.one_of(st.binary(max_size=200), mutated(a_frame().SerializeToString())))
def test_only_known_fields_of_a_frame_are_kept(body: bytes) -> None:
    rpc = rpc_pb2.RPC()
    try:
        rpc.ParseFromString(body)
    except DecodeError:
        return
    kept = trimmed(rpc, TOPIC, MAX_MESSAGE_BYTES)
    assert kept.ByteSize() <= len(body) + 16
    assert not kept.HasField("senderRecord")
    assert all(list(message.topicIDs) == [TOPIC] for message in kept.publish)
    assert all(option.topicid == TOPIC for option in kept.subscriptions)
    for kind in ("ihave", "graft", "prune"):
        assert all(part.topicID == TOPIC for part in getattr(kept.control, kind))
    assert not any(prune.peers or prune.backoff > 600 for prune in kept.control.prune)
    assert cost_of(kept, len(body)) > 0


def test_long_lists_are_cut() -> None:
    rpc = rpc_pb2.RPC()
    rpc.control.iwant.add(messageIDs=[bytes(32)] * 5000)  # one message, 5000 times
    rpc.control.iwant.add(messageIDs=[number.to_bytes(32, "big") for number in range(5000)])
    rpc.control.ihave.add(topicID=TOPIC, messageIDs=[number.to_bytes(32, "big") for number in range(5000)])
    for number in range(5000):
        rpc.control.graft.add(topicID=f"/another/{number}")
        rpc.control.idontwant.add(messageIDs=[bytes(32)])
        rpc.subscriptions.add(subscribe=True, topicid=TOPIC)
        rpc.publish.add(topicIDs=[TOPIC], data=b"x", from_id=id_of(Key(bytes(32)).public).to_bytes())
    kept = trimmed(rpc, TOPIC, MAX_MESSAGE_BYTES)
    assert [len(iwant.messageIDs) for iwant in kept.control.iwant] == [1, 64]
    assert [len(ihave.messageIDs) for ihave in kept.control.ihave] == [256]
    assert (len(kept.control.graft), len(kept.control.idontwant)) == (0, 0)
    assert (len(kept.subscriptions), len(kept.publish)) == (8, 256)


def test_origins_that_are_not_ed25519_keys_are_dropped() -> None:
    """A message brings its origin's key, which may have any type and length."""
    good = signed(Key(bytes([5]) * 32), b"x")
    for from_id in (b"", bytes(38), good.from_id[:-1], b"\x12\x20" + bytes(32)):
        bad = rpc_pb2.Message(data=b"x", topicIDs=[TOPIC], from_id=from_id, key=bytes(2000), signature=bytes(64))
        assert [each.from_id for each in trimmed(rpc_pb2.RPC(publish=[bad, good]), TOPIC, 100).publish] == [
            good.from_id
        ]


def test_a_neighbour_has_a_budget_and_its_record_is_bounded() -> None:
    neighbours = Neighbours()
    assert not any(neighbours.charge(b"a", 1.0, 0.0) for _ in range(250))
    assert neighbours.charge(b"a", 1.0, 0.0) == pytest.approx(1 / 25)
    assert not neighbours.charge(b"b", 1.0, 0.0)
    assert [neighbours.charge_forgery(b"a", 0.0) for _ in range(6)] == [False] * 5 + [True]
    assert not neighbours.charge_forgery(b"a", 10.0)  # one in ten seconds is forgiven
    for number in range(10_000):
        neighbours.charge(number.to_bytes(4, "big"), 1.0, 0.0)
    assert len(neighbours._work) == 4096


async def say(liar: Member, peer: PeerKey, *frames: bytes) -> trio.abc.HalfCloseableStream:
    """Send raw GossipSub frames on a new stream."""
    assert isinstance(liar.transport, Libp2pTransport)
    stream = await liar.transport.open_protocol_stream(peer, "/meshsub/1.1.0")
    await stream.send_all(b"".join(encode_uvarint(len(frame)) + frame for frame in frames))
    return stream


async def test_malformed_frames_end_their_stream_only() -> None:
    """Malformed frames of every kind to a running service: it goes on, and so do its neighbours."""
    draw, valid_frame = random.Random(1), a_frame().SerializeToString()
    with trio.fail_after(60):
        async with chain(3, libp2p_member) as members:
            await settle(members)
            pubsub = members[1].announcer._pubsub
            assert isinstance(pubsub, BoundedPubsub)
            pubsub._neighbours.worked = lambda *_: 0.0  # type: ignore[method-assign]  # without a rate limit
            pubsub._neighbours.forged = lambda *_: False  # type: ignore[method-assign]
            liar = members[0].transport.key
            for _ in range(1500):
                body = bytearray(valid_frame)
                for _ in range(draw.randrange(1, 6)):
                    body[draw.randrange(len(body))] = draw.randrange(256)
                with suppress(PeerError):
                    await pubsub.handle_frame(id_of(liar), liar, bytes(body[: draw.randrange(50, len(body) + 1)]))
            await pubsub.handle_frame(id_of(liar), liar, b"\x0a\x04\x12\x02\xff\xfe")  # no text, so none of our topics
            stream = await say(members[0], members[1].transport.key, b"\xff\xff\xff")
            with suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""
            await until(lambda: liar not in members[1].transport.peers())
            for near, far in (members[1:], members[:0:-1]):
                await reaches(near, far)


async def test_a_neighbour_that_forges_repeatedly_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[PeerKey] = []
    with trio.fail_after(30):
        async with chain(2, libp2p_member) as members:
            liar, victim = members
            await settle(members)
            disconnect = victim.transport.disconnect

            async def drop(peer: PeerKey) -> None:
                dropped.append(peer)
                await disconnect(peer)

            monkeypatch.setattr(victim.announcer._pubsub, "_drop", drop)
            before = guard.dropped[guard.Source.GOSSIP]
            forged = [signed(Key(bytes([1]) * 32), b"bad %d" % number) for number in range(3)]
            for number in range(3):
                forged.append(signed(Key(bytes([1]) * 32), b"good %d" % number))
                forged[-1].signature = bytes(64)
            frames = [rpc_pb2.RPC(publish=[message]).SerializeToString() for message in forged]
            await say(liar, victim.transport.key, *frames[:5])
            await trio.sleep(0.3)
            assert not dropped
            await say(liar, victim.transport.key, frames[5])
            await until(lambda: dropped == [liar.transport.key])
            assert guard.dropped[guard.Source.GOSSIP] > before
            assert not victim.got


async def test_a_flood_is_read_at_the_neighbours_rate_and_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.transport.pubsub._MESSAGES_AT_ONCE", 20.0)
    with trio.fail_after(30):
        async with chain(2, libp2p_member) as members:
            await settle(members)
            frames = [
                rpc_pb2.RPC(publish=[signed(Key(bytes([1]) * 32), b"%d" % number)]).SerializeToString()
                for number in range(60)
            ]
            begun_s = trio.current_time()
            await say(members[0], members[1].transport.key, *frames)
            await until(lambda: len(members[1].got) == 60)
            assert trio.current_time() - begun_s > 1.2


async def test_the_service_restarts_when_the_library_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_STRICT")
    monkeypatch.setattr("swarm.gossip.announcements._RESTART_S", 0.1)
    with trio.fail_after(30):
        async with chain(2, libp2p_member) as members:
            await settle(members)
            pubsub = members[1].announcer._pubsub

            async def fail() -> None:
                raise LookupError("a bug of the library's")

            before = guard.bugs[guard.Source.GOSSIP]
            pubsub.manager.run_task(fail)  # one task may fail
            await until(lambda: guard.bugs[guard.Source.GOSSIP] == before + 1)
            assert members[1].announcer._pubsub is pubsub
            pubsub.manager.run_daemon_task(fail)  # and one of the service's own tasks
            await until(lambda: members[1].announcer._pubsub not in (None, pubsub))
            assert guard.bugs[guard.Source.GOSSIP] == before + 2
            await reaches(members[0], members[1])
