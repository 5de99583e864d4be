"""Strangers at a real port: silent, slow, hostile, many. Members and newcomers are served meanwhile."""

import os
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.exceptions import ConnectionClosedError
from libp2p_kit import ANY, echo, transport

from codec.sign import Key
from swarm.transport.base import Lane, PeerKey, Unreachable
from swarm.transport.connection.certificate import make_certificate
from swarm.transport.connection.gate import GateRules
from swarm.transport.connection.handshakes import Arrival, HandshakeRules, HandshakeTurns
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.probe import who_answers
from swarm.transport.rules import PeerPolicy, TransportRules

HELLO = b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n"
RULES = HandshakeRules(pending=40, pending_per_address=8, silent_s=0.5)


@asynccontextmanager
async def a_node(
    admitted: set[PeerKey],
    rules: HandshakeRules | None = None,
    gate: GateRules | None = None,
    known: Container[PeerKey] = (),
    limit_s: float = 30,
) -> AsyncIterator[tuple[Libp2pTransport, str]]:
    node = Libp2pTransport(
        Key(b"n" * 32),
        [ANY],
        policy=PeerPolicy(admits=admitted.__contains__, knows=known.__contains__),
        rules=TransportRules(handshakes=rules or HandshakeRules(), gate=gate or GateRules()),
    )
    with trio.fail_after(limit_s):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(node.serve, echo)
            yield node, address
            nursery.cancel_scope.cancel()


async def connect_from(address: str, number: int) -> trio.SocketStream:
    """Connect from 127.1.x.y."""
    sock = trio.socket.socket()
    await sock.bind((f"127.1.{number >> 8}.{number & 255}", 0))
    await sock.connect(("127.0.0.1", int(address.rsplit("/", 1)[1])))
    return trio.SocketStream(sock)


async def closed_after(stream: trio.abc.ReceiveStream) -> float:
    started_s = trio.current_time()
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass
    return trio.current_time() - started_s


def credentials(seed: int) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["/yamux/1.0.0"])
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join(make_certificate(create_new_key_pair(seed.to_bytes(32, "big")))))
        file.flush()
        context.load_cert_chain(file.name)
    return context


async def shake_hands(stream: trio.SocketStream, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    await stream.send_all(HELLO)
    heard = b""
    while len(heard) < len(HELLO):
        heard += await stream.receive_some(len(HELLO) - len(heard))
    secured = trio.SSLStream(stream, context)
    await secured.do_handshake()
    return secured


async def seconds_until_served(near: Libp2pTransport, far: Libp2pTransport, address: str) -> float:
    """Seconds until `near` has an answer from `far`."""
    started_s = trio.current_time()
    while True:
        try:
            await near.connect(far.key, [address])
            async with await near.open_stream(far.key, Lane.CONTROL) as stream:
                await stream.send_all(b"ticket")
                assert await stream.receive_some() == b"ticket"
                return trio.current_time() - started_s
        except (Unreachable, trio.BrokenResourceError):
            await trio.sleep(0.05)


def tables(node: Libp2pTransport) -> list[Any]:
    """Every table in which a stranger could leave an entry."""
    assert node.host is not None
    assert node.tcp is not None
    swarm: Any = node.host.get_network()
    host: Any = node.host
    return [
        node.tcp.live, node.tcp.reception._held, node.tcp.reception._watched.get_map(), node._gate._strangers,
        node._gate._by_host, node._edges, node._addresses, node._connecting, node._arriving, node._dialer._backoff,
        swarm.connections, swarm.tag_store._tags, swarm.auto_connector._recent_disconnects, swarm.manager._root_tasks,
        host._identified_peers, host._identify_inflight, node._handshakes._silent, node._handshakes._waiting,
        node._handshakes._busy, node._handshakes._first,
    ]  # fmt: skip


async def test_silent_connections_from_many_addresses_keep_no_newcomer_out() -> None:
    """Twice as many as the table holds; each is replaced at once when it is closed."""
    newcomer = transport(1)
    async with a_node(set(), RULES) as (node, address), trio.open_nursery() as nursery:
        await nursery.start(newcomer.serve, echo)

        async def be_silent(number: int) -> None:
            while True:
                async with await connect_from(address, number) as stream:
                    await closed_after(stream)
                await trio.sleep(0.05)

        before = [len(each) for each in tables(node)]
        async with trio.open_nursery() as strangers:
            for number in range(80):
                strangers.start_soon(be_silent, number)
            await trio.sleep(0.3)
            assert node._handshakes.pending == 40
            assert await seconds_until_served(newcomer, node, address) < 3
            strangers.cancel_scope.cancel()
        await newcomer.disconnect(node.key)
        while [len(each) for each in tables(node)] != before:  # noqa: ASYNC110
            await trio.sleep(0.02)
        nursery.cancel_scope.cancel()


async def test_a_silent_connection_is_closed_in_time() -> None:
    async with a_node(set(), RULES) as (_, address), await connect_from(address, 1) as stream:
        assert 0.3 < await closed_after(stream) < 2


async def test_a_stranger_that_proves_a_key_and_stays_silent_is_closed_in_time() -> None:
    async with a_node(set(), gate=GateRules(speak_s=0.5)) as (node, address):
        stream = await shake_hands(await connect_from(address, 1), credentials(1))
        while not node.peers():  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert 0.2 < await closed_after(stream) < 3
        assert node.peers() == []
        await trio.aclose_forcefully(stream)


async def test_a_stranger_that_stops_amid_the_handshake_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.transport.connection.upgrade.ANSWER_S", 0.5)
    async with a_node(set()) as (_, address):
        stream = await connect_from(address, 1)
        await stream.send_all(HELLO)
        assert 0.3 < await closed_after(stream) < 3
        await stream.aclose()


async def test_members_stay_while_strangers_come_and_go() -> None:
    member = transport(1)
    rules = GateRules(connections=4, per_address=2)
    async with a_node(set(), gate=rules, known={member.key}) as (node, address), trio.open_nursery() as nursery:
        await nursery.start(member.serve, echo)
        before = [len(each) for each in tables(node)]
        await seconds_until_served(member, node, address)
        connection = node._connections(member.key)[0]
        strangers = []
        for number in range(16):
            strangers.append(await shake_hands(await connect_from(address, number // 2), credentials(number)))
        while len(node.peers()) > 5 or len(node._gate._strangers) != 4:  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert node._connections(member.key) == [connection]
        for each in strangers:
            await trio.aclose_forcefully(each)
        await member.disconnect(node.key)
        while [len(each) for each in tables(node)] != before:  # noqa: ASYNC110
            await trio.sleep(0.02)
        assert len(node._gate._member_hosts) == 1
        nursery.cancel_scope.cancel()


async def test_garbage_that_looks_like_a_token_costs_a_turn_and_no_more() -> None:
    newcomer = transport(1)
    async with a_node(set(), RULES) as (node, address), trio.open_nursery() as nursery:
        await nursery.start(newcomer.serve, echo)
        for number in range(20):
            stream = await connect_from(address, number)
            await stream.send_all(b"\1" + bytes(16))
            await closed_after(stream)
            await stream.aclose()
        assert await seconds_until_served(newcomer, node, address) < 3
        nursery.cancel_scope.cancel()


async def test_too_much_handshake_is_not_read() -> None:
    async with a_node(set()) as (node, address):
        stream = await connect_from(address, 1)
        await stream.send_all(HELLO)
        hello = b"\x01" + (60_000).to_bytes(3, "big") + bytes(16_000)
        with suppress(trio.BrokenResourceError):
            for at in range(0, len(hello), 4000):
                part = hello[at : at + 4000]
                await stream.send_all(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part)
            assert await closed_after(stream) < 3
        await stream.aclose()
        assert node.traffic.received < 10_000


@asynccontextmanager
async def resetting(after_s: float = 0.0) -> AsyncIterator[str]:
    """A listener that accepts and resets."""
    listener = trio.socket.socket()
    await listener.bind(("127.0.0.1", 0))
    listener.listen()

    async def reset() -> None:
        while True:
            sock, _ = await listener.accept()
            await trio.sleep(after_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reset)
        yield f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_a_listener_that_accepts_and_resets_is_unreachable() -> None:
    """Regression: `getpeername` failed on such a connection, and that ended the process that dialed back."""
    peer = Key(b"p" * 32).public
    async with a_node(set()) as (node, _), resetting() as address:
        for _ in range(20):
            assert not await node.probe(peer, address)
            with pytest.raises(Unreachable):
                await who_answers(node.host, address)
        with pytest.raises(Unreachable):
            await node.connect(peer, [address])
        assert node.tcp is not None
        assert node.tcp.live == set()


async def test_a_connection_that_ends_before_we_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the reset had come between `connect` and `getpeername`, without depending on chance."""
    peer = Key(b"p" * 32).public
    async with a_node(set()) as (node, address), resetting(0.02) as there:
        tcp = node.tcp
        assert tcp is not None

        async def connect(target: tuple[str, int]) -> trio.SocketStream:
            stream = await trio.open_tcp_stream(*target)
            await trio.sleep(0.1)
            with pytest.raises(OSError, match="not connected"):
                stream.socket.getpeername()
            return stream

        monkeypatch.setattr(tcp, "_connect", connect)
        assert not await node.probe(peer, there)
        with pytest.raises(Unreachable):
            await node.connect(peer, [there])
        stream = await trio.open_tcp_stream("127.0.0.1", int(there.rsplit("/", 1)[1]))
        await trio.sleep(0.1)
        with pytest.raises(OSError, match="not connected"):
            tcp.own(stream)
        assert stream.socket.fileno() < 0
        assert tcp.live == set()
        reset = await connect_from(address, 1)  # the same at our own port
        await reset.send_all(HELLO)
        reset.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.socket.close()
        await trio.sleep(0.1)
        assert tcp.live == set()


@asynccontextmanager
async def showing(der_of: Any) -> AsyncIterator[str]:
    """A listener that shows the certificate of `der_of`, which gets its private key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["/yamux/1.0.0"])
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(ssl.DER_cert_to_PEM_cert(der_of(key)))
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())
        file.flush()
        context.load_cert_chain(file.name)

    async def show(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.receive_some()
            await stream.send_all(HELLO)
            await trio.SSLStream(stream, context, server_side=True).do_handshake()
            await closed_after(stream)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, show, 0)
        yield f"/ip4/127.0.0.1/tcp/{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["garbage", "critical", "nothing"])
async def test_an_unreadable_certificate_proves_nothing(kind: str) -> None:
    """Regression: the seed dials every joiner back, and such a certificate ended it, again at every start."""
    from cryptography import x509
    from test_certificate import OTHER, certificate, names, signed_key

    def der(key: Any) -> bytes:
        if kind == "garbage":
            return certificate(names(bytes([0x30, 104, 4, 36]) + b"\xff" * 36 + b"\x04\x40" + bytes(64)), key=key)
        if kind == "critical":
            return certificate(names(signed_key(key=key)), (x509.UnrecognizedExtension(OTHER, b""), True), key=key)
        return certificate(key=key)

    anna = Key(b"a" * 32).public
    async with a_node(set()) as (node, _), showing(der) as address:
        assert not await node.probe(anna, address)
        with pytest.raises(Unreachable, match="TLS certificate"):
            await who_answers(node.host, address)
        with pytest.raises(Unreachable):
            await node.connect(anna, [address])


async def test_a_chain_of_certificates_is_refused() -> None:
    async with a_node(set()) as (node, address):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["/yamux/1.0.0"])
        (first, key), (second, _) = (make_certificate(create_new_key_pair(bytes([seed]) * 32)) for seed in (1, 2))
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(first + second + key)
            file.flush()
            context.load_cert_chain(file.name)
        stream = await shake_hands(await connect_from(address, 1), context)
        await closed_after(stream)
        assert node.peers() == []


async def test_reading_a_closed_socket_says_that_it_is_closed() -> None:
    """Regression: trio took the second closed socket for the first and reported it as busy, an unexpected error."""
    async with a_node(set()) as (node, address):
        assert node.tcp is not None
        for number in range(2):
            sock = node.tcp.own(await connect_from(address, number))
            sock.abort()
            with pytest.raises(ConnectionClosedError):
                await sock.read_into(memoryview(bytearray(9)))


_CROWD = """
import sys
from contextlib import suppress
import trio
from test_strangers import HELLO, closed_after, connect_from, credentials, shake_hands
address, tasks = sys.argv[1], int(sys.argv[2])
contexts = [credentials(seed) for seed in range(10)]
came = 0
async def intrude(number):
    global came
    while True:
        with suppress(OSError, trio.BrokenResourceError):
            stream = await connect_from(address, number % 1000)
            came += 1
            try:
                if number % 3 == 1:
                    await stream.send_all(HELLO)
                if number % 3 == 2:
                    await shake_hands(stream, contexts[number % 10])
                await closed_after(stream)
            finally:
                await trio.aclose_forcefully(stream)
        await trio.sleep(0.1)
async def main():
    async with trio.open_nursery() as nursery:
        for number in range(tasks):
            nursery.start_soon(intrude, number)
        while True:
            await trio.sleep(0.2)
            print(came, flush=True)
trio.run(main)
"""


async def seconds_until_admitted(node: Libp2pTransport, address: str, number: int) -> float:
    """Seconds until a newcomer from an address of its own has proved its key."""
    started_s, key = trio.current_time(), Key(number.to_bytes(32, "big")).public
    while True:
        stream = await connect_from(address, number)
        try:
            await shake_hands(stream, credentials(number))
            with trio.move_on_after(1):  # our end finishes the handshake before the node does, which may still close it
                while key not in node.peers():  # noqa: ASYNC110
                    await trio.sleep(0.01)
                return trio.current_time() - started_s
        except trio.BrokenResourceError:
            await trio.sleep(0.5)
        finally:
            await trio.aclose_forcefully(stream)


@pytest.mark.slow
@pytest.mark.long
async def test_ten_thousand_strangers_from_a_thousand_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of them are silent, a third stop amid the handshake, a third prove a key; all connect again when closed.

    A newcomer's wait is counted in handshakes of others, at most 111 a second, and the median newcomer is judged. On a
    busy machine, seconds and the slowest newcomer say more about that machine.
    """
    turns, begun = HandshakeTurns.next_turns, 0

    def counted(self: HandshakeTurns, now_s: float) -> tuple[list[Arrival], list[Arrival]]:
        nonlocal begun
        result = turns(self, now_s)
        begun += len(result[0])
        return result

    monkeypatch.setattr(HandshakeTurns, "next_turns", counted)
    member = transport(2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    async with a_node(set(), known={member.key}, limit_s=150) as (node, address), trio.open_nursery() as nursery:
        await nursery.start(member.serve, echo)
        before = [len(each) for each in tables(node)]
        await seconds_until_served(member, node, address)
        connection = node._connections(member.key)[0]
        command = [sys.executable, "-c", _CROWD, address, "2500"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as crowd:  # noqa: ASYNC220
            try:
                assert crowd.stdout is not None
                others, in_s, late_s, since_s, came = [], [], [], trio.current_time(), 0
                while came < 10_000 and trio.current_time() < since_s + 60:
                    came = int(await trio.to_thread.run_sync(crowd.stdout.readline))
                    asked_s = trio.current_time()
                    async with await member.open_stream(node.key, Lane.CONTROL) as stream:
                        await stream.send_all(b"heartbeat")
                        await stream.receive_some()
                    late_s.append(trio.current_time() - asked_s)
                    if came:
                        before_it = begun
                        in_s.append(await seconds_until_admitted(node, address, 0x8000 + len(in_s)))
                        others.append(begun - before_it)
            finally:
                crowd.kill()
        typical, typical_s = sorted(others)[len(others) // 2], sorted(in_s)[len(in_s) // 2]
        print(f"{came} strangers; newcomers in after {typical} handshakes of others, at most {max(others)}")
        print(
            f"in seconds {typical_s:.2f}, at most {max(in_s):.1f}; a member's question took at most {max(late_s):.2f}"
        )
        assert typical < 300
        assert node._connections(member.key) == [connection]
        await member.disconnect(node.key)
        while [len(each) for each in tables(node)] != before:  # noqa: ASYNC110
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
