"""Outbound TCP connections."""

import pytest
import trio
import trio.testing
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarm.transport.base import Traffic
from swarm.transport.connection.handshakes import HandshakeTurns
from swarm.transport.connection.tcp import CountedSocket, TcpTransport


async def refuse_token(token: bytes, sock: CountedSocket) -> bool:
    return False


async def test_a_dial_is_given_up_before_the_kernel_would_wait_long(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(host: str, port: int) -> trio.SocketStream:
        return await trio.sleep_forever()

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    tcp = TcpTransport(Traffic(), {}, HandshakeTurns(), refuse_token)
    with pytest.raises(OpenConnectionError, match="cannot reach"):
        await tcp.dial(Multiaddr("/ip4/192.0.2.1/tcp/4701"))
    assert trio.current_time() == pytest.approx(5.0)


async def test_an_address_that_does_not_answer_is_tried_again_beside_the_first_attempt(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt gets through, and the first is cancelled."""
    began: list[float] = []
    cancelled: list[float] = []
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    real = trio.open_tcp_stream

    async def connect(host: str, port: int) -> trio.SocketStream:
        began.append(trio.current_time())
        if len(began) > 1:
            return await real(*listener.socket.getsockname())
        try:
            return await trio.sleep_forever()
        finally:
            cancelled.append(trio.current_time())

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    tcp = TcpTransport(Traffic(), {}, HandshakeTurns(), refuse_token)
    connection = await tcp.dial(Multiaddr("/ip4/192.0.2.1/tcp/4701"))
    assert began[:2] == [0.0, 0.25]
    assert len(cancelled) == 1
    assert len(tcp.live) == 1
    await connection.close()
    await listener.aclose()


async def test_a_refusal_ends_a_dial_at_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []

    async def connect(host: str, port: int) -> trio.SocketStream:
        began.append(trio.current_time())
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    tcp = TcpTransport(Traffic(), {}, HandshakeTurns(), refuse_token)
    with pytest.raises(OpenConnectionError):
        await tcp.dial(Multiaddr("/ip4/192.0.2.1/tcp/4701"))
    assert began == [0.0]
    assert trio.current_time() == 0.0


async def test_a_dial_from_the_listening_port_is_made_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt could not have the same port, and the relay would see an address that nobody can dial."""
    began: list[float] = []

    async def connect(host: str, port: int) -> trio.SocketStream:
        began.append(trio.current_time())
        return await trio.sleep_forever()

    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    tcp = TcpTransport(Traffic(), {}, HandshakeTurns(), refuse_token)
    tcp.from_listen_port.add(("192.0.2.1", 4701))
    with pytest.raises(OpenConnectionError):
        await tcp.dial(Multiaddr("/ip4/192.0.2.1/tcp/4701"))
    assert began == [0.0]
