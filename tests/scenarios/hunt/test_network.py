"""How connections end: mostly in order, sometimes by a reset."""

import pytest
import trio
import trio.testing

from codec.sign import Key
from scenarios.hunt.network import HuntNetwork
from swarm.transport.memory import MemoryTransport

A, B = Key(b"a" * 32), Key(b"b" * 32)


async def delivered(network: HuntNetwork) -> bool:
    """Whether what is sent just before the connection is closed arrives."""
    near, far = MemoryTransport(network, A), MemoryTransport(network, B)
    network.join(near.key, far.key)
    near_end, far_end = network.stream_pair(near, far)
    await near_end.send_all(b"goodbye")
    await near.disconnect(far.key)
    try:
        return await far_end.receive_some() == b"goodbye"
    except trio.BrokenResourceError:
        return False


async def test_most_closed_connections_deliver_what_was_sent(autojump_clock: trio.testing.MockClock) -> None:
    network = HuntNetwork(1)
    outcomes = [await delivered(network) for _ in range(100)]
    assert 70 < sum(outcomes) < 100


async def test_a_path_that_is_cut_loses_what_is_on_its_way(autojump_clock: trio.testing.MockClock) -> None:
    network = HuntNetwork(1)
    near, far = MemoryTransport(network, A), MemoryTransport(network, B)
    network.join(near.key, far.key)
    near_end, far_end = network.stream_pair(near, far)
    await near_end.send_all(b"hello")
    network.cut(near.key, far.key)
    with pytest.raises(trio.BrokenResourceError):
        await far_end.receive_some()
