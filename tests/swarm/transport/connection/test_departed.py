"""Bytes of IP packets, as the kernel counts them."""

import socket

import pytest

from swarm.transport.base import Lane
from swarm.transport.connection.departed import departed_bytes
from tests.swarm.transport.libp2p_kit import two


def test_whole_packets_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            before, idle = departed_bytes(near), departed_bytes(far)
            assert before is not None
            assert idle is not None
            near.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(far.recv(65_536))
            after, acknowledged = departed_bytes(near), departed_bytes(far)
            assert after is not None
            assert acknowledged is not None
            assert 100_052 <= after - before <= 110_000
            assert acknowledged > idle


class Silent:
    family = socket.AF_INET

    def __init__(self, counters: bytes | None) -> None:
        self.counters = counters

    def getsockopt(self, *_: object) -> bytes:
        if self.counters is None:
            raise OSError
        return self.counters


@pytest.mark.parametrize("counters", [None, b"", bytes(104)])
def test_a_system_without_the_counters(counters: bytes | None) -> None:
    assert departed_bytes(Silent(counters)) is None


async def test_departed_bytes_stay_counted_after_a_connection_is_closed() -> None:
    async with two() as (a, b, _):
        async with await a.open_stream(b.key, Lane.BULK) as stream:
            await stream.send_all(bytes(1 << 20))
            received = 0
            while received < 1 << 20:
                received += len(await stream.receive_some(1 << 16))
            before = a.departed_bytes()
        await a.disconnect(b.key)
        after = a.departed_bytes()
        assert before is not None
        assert after is not None
        assert after >= before > a.traffic.sent > 1 << 20
    assert a.departed_bytes() is None
