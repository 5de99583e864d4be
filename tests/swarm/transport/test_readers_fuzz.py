"""For any bytes from an unauthenticated peer or relay, each reader returns a value or raises `PeerError`."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from relay_kit import World, until, world

from codec.errors import PeerError
from codec.sign import Key
from swarm.transport.base import Lane
from swarm.transport.connection.multistream import HEADER, answer, encode, propose
from swarm.transport.nat import punch
from swarm.transport.nat.circuit import (
    HOP_ID,
    HopMessage,
    Reservation,
    Status,
    StopMessage,
    key_in,
    observed_in,
    peer_in,
    read_message,
    status_name,
    write_message,
)
from swarm.transport.nat.punch import Puncher
from swarm.transport.nat.reservations import Reservations

KEY = Key(bytes(32)).public
NOT_TEXT = b"\xff\xfe\xc3"


class Delivers:
    """A stream, and a multistream channel, that delivers `data` and ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        length = len(self._data) if max_bytes is None else max_bytes
        data, self._data = self._data[:length], self._data[length:]
        return data

    async def read(self, n: int | None = None, /) -> bytes:
        return await self.receive_some(n)

    async def write(self, data: bytes, /) -> None: ...


def outcome(read: Callable[..., Awaitable[Any]], data: bytes, *args: object) -> object:
    """Return the result of `read`, or None if it raised `PeerError`. Any other error fails the test."""

    async def run() -> object:
        return await read(cast("Any", Delivers(data)), *args)

    with suppress(PeerError):
        return trio.run(run)
    return None


def mutated(valid: bytes) -> st.SearchStrategy[bytes]:
    """`valid` with some bytes changed, removed or inserted."""

    def change(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = bytearray(valid)
        for at, length, put in edits:
            start = at % (len(data) + 1)
            data[start : start + length] = put
        return bytes(data)

    edit = st.tuples(st.integers(0, 500), st.integers(0, 4), st.binary(max_size=4))
    return st.lists(edit, min_size=1, max_size=4).map(change)


def framed(body: bytes) -> bytes:
    return bytes([len(body) & 0x7F | 0x80, len(body) >> 7]) + body


HOP = HopMessage(
    type=HopMessage.STATUS,
    status=Status.OK,
    peer=peer_in(KEY, "/ip4/1.2.3.4/tcp/5"),
    reservation=Reservation(expire=2**63, addrs=[b"x"], voucher=b"y"),
).SerializeToString()
STOP = StopMessage(type=StopMessage.CONNECT, peer=peer_in(KEY, "/ip6/::1/tcp/5")).SerializeToString()


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(framed), mutated(HOP).map(framed)))
def test_hop_messages(data: bytes) -> None:
    look_at(outcome(read_message, data, HopMessage))


@given(st.one_of(st.binary(max_size=300).map(framed), mutated(STOP).map(framed)))
def test_stop_messages(data: bytes) -> None:
    look_at(outcome(read_message, data, StopMessage))


def look_at(message: object) -> None:
    """Use every field of a message as the product does."""
    if message is None:
        return
    assert isinstance(message, HopMessage | StopMessage)
    assert status_name(message.status)
    with suppress(PeerError):
        assert len(key_in(message.peer)) == 32
    seen_at = observed_in(message.peer)
    assert seen_at is None or isinstance(seen_at, str)
    peer_in(KEY, seen_at)  # a relay passes it on


@given(st.one_of(st.binary(max_size=100), mutated(peer_in(KEY, None).id)), st.binary(max_size=100))
def test_peers_and_addresses(id_: bytes, address: bytes) -> None:
    peer = peer_in(KEY, None)
    peer.id = id_
    peer.addrs.append(address)
    with suppress(PeerError):
        assert len(key_in(peer)) == 32
    seen_at = observed_in(peer)
    assert seen_at is None or isinstance(seen_at, str)


MEETING = msgspec.msgpack.encode([bytes(16), ["/ip4/1.2.3.4/tcp/5", "/dns4/example.org/tcp/6"]])


@given(st.one_of(st.binary(max_size=300), mutated(MEETING)))
def test_meetings(body: bytes) -> None:
    look_at_meeting(outcome(punch._receive, len(body).to_bytes(2, "little") + body))


@given(st.lists(st.text(max_size=80) | st.sampled_from(["/dns4/" + "a" * 80 + ".b/tcp/1", "/ip4/1.2.3.4/tcp/0"])))
def test_meeting_addresses(addrs: list[str]) -> None:
    look_at_meeting(outcome(punch._receive, framed_meeting(addrs)))


def framed_meeting(addrs: list[str]) -> bytes:
    body = msgspec.msgpack.encode([bytes(16), addrs])
    return len(body).to_bytes(2, "little") + body


def puncher() -> Puncher:
    """Return a puncher whose observed address is public."""
    return Puncher(cast("Any", None), cast("Any", SimpleNamespace(observed="/ip4/8.8.8.8/tcp/1")))


def look_at_meeting(meeting: object) -> None:
    if meeting is not None:
        targets = puncher()._targets(cast("Any", meeting).addrs)
        assert all(punch._is_ip(host) for host, _ in targets)


def test_a_meeting_that_is_not_text() -> None:
    """Regression: such a meeting ended the process that had dialed a circuit."""
    body = b"\x92\xc4\x10" + bytes(16) + b"\x91\xa3" + NOT_TEXT
    assert outcome(punch._receive, len(body).to_bytes(2, "little") + body) is None


def test_names_are_not_dialed_to_punch() -> None:
    """A name may resolve to a host in our own network."""
    addrs = ["/dns4/localhost/tcp/22", "/dns/x.example/tcp/1", "/ip4/10.0.0.1/tcp/1", "/ip4/8.8.4.4/tcp/1"]
    assert puncher()._targets(addrs) == {("8.8.4.4", 1)}


@given(st.one_of(st.binary(max_size=200), mutated(encode(HEADER, "/a/1", "ls", "na", "/b/1"))))
def test_negotiation(data: bytes) -> None:
    assert outcome(answer, data, ["/a/1", "/b/1"]) in (None, "/a/1", "/b/1")
    assert outcome(propose, data, ["/a/1", "/b/1"]) in (None, "/a/1", "/b/1")


@pytest.mark.parametrize("expire", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("status", [Status.OK, 0, 77])
async def test_any_answer_of_a_relay_is_survived(
    expire: int, status: int, autojump_clock: trio.testing.MockClock
) -> None:
    """The answers have absurd times, unknown statuses and invalid addresses."""
    tries = 0

    async def open_stream(*_: object) -> trio.abc.HalfCloseableStream:
        nonlocal tries
        tries += 1
        near, far = trio.testing.memory_stream_pair()
        reply = HopMessage(type=HopMessage.STATUS, reservation=Reservation(expire=expire), peer=peer_in(KEY, None))
        reply.peer.addrs.append(b"\xff\xff")
        with suppress(ValueError):  # where protobuf refuses unknown numbers, none can arrive either
            reply.status = cast("Any", status)
        await write_message(far, reply)
        return near

    async def connect(*_: object) -> bytes:
        return KEY

    async def wait_disconnected(*_: object) -> None:
        await trio.sleep_forever()

    relays = SimpleNamespace(connect=connect, note_observed=lambda relay, seen_at: None)
    connections = SimpleNamespace(
        open_protocol_stream=open_stream,
        wait_disconnected=wait_disconnected,
        allow_streams=lambda peer, streams: None,
    )
    reservations = Reservations(cast("Any", connections), cast("Any", relays), ["/ip4/1.2.3.4/tcp/5"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reservations.keep_all)
        await trio.sleep(3600)
        nursery.cancel_scope.cancel()
    assert 2 <= tries <= 130  # the relay is asked again, at most every 30 s


@pytest.mark.usefixtures("no_punching")
@pytest.mark.parametrize(
    "request_of",
    [
        lambda w: framed(b"\x08\x01\x12\x02\x0a\x00"),  # a circuit to an empty peer id
        lambda w: framed(b"\x08\x01\x12\x28\x0a\x26" + bytes(38)),  # to a peer id without a key
        lambda w: framed(b"\x08\x01\x12\x05\x0a\x03" + NOT_TEXT),
    ],
)
async def test_a_relay_survives_malformed_requests(request_of: Callable[[World], bytes]) -> None:
    async with world() as w:
        await w.caller.connect(w.relay.key, [w.address])
        stream = await w.caller.open_protocol_stream(w.relay.key, HOP_ID)
        await stream.send_all(request_of(w))
        with suppress(trio.BrokenResourceError):
            assert await stream.receive_some() == b""
        await until(lambda: w.relay.peers())
        await w.call()
        async with await w.caller.open_stream(w.hidden.key, Lane.CONTROL) as lane:
            await lane.send_all(b"x")
            assert await lane.receive_some() == b"x"
