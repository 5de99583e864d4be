"""Behaviour that only a real clock shows, with the default limits: readers that pause, processes that stop. Takes
minutes."""

import signal

import pytest
import trio
from libp2p_kit import ANY, a_process, echo

from codec.sign import Key
from swarm.transport.base import Lane, PeerKey
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.yamux import YamuxLimits

PAUSE_S = 65.0
LENGTH = 24 << 20


@pytest.mark.slow
@pytest.mark.long
async def test_a_reader_that_pauses_a_minute_loses_nothing() -> None:
    """py-libp2p's own muxer resets a stream after five seconds."""
    got, done = 0, trio.Event()

    async def pause(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
        nonlocal got
        got += len(await stream.receive_some(1))
        await trio.sleep(PAUSE_S)
        async for data in stream:
            got += len(data)
        done.set()

    near, far = (Libp2pTransport(Key(bytes([n]) * 32), [ANY]) for n in (1, 2))
    with trio.fail_after(PAUSE_S + 20):
        async with trio.open_nursery() as nursery:
            await nursery.start(near.serve, pause)
            addrs = await nursery.start(far.serve, pause)
            await near.connect(far.key, addrs)
            async with await near.open_stream(far.key, Lane.BULK) as stream:
                started_s = trio.current_time()
                await stream.send_all(bytes(LENGTH))
                assert trio.current_time() - started_s > PAUSE_S - 5  # the writer waited for the reader
            await done.wait()
            nursery.cancel_scope.cancel()
    assert got == LENGTH


@pytest.mark.slow
async def test_a_stopped_process_is_gone_within_the_stated_time() -> None:
    limits = YamuxLimits()
    near = Libp2pTransport(Key(b"n" * 32), [ANY])
    async with a_process() as (child, far, address), trio.open_nursery() as nursery:
        await nursery.start(near.serve, echo)
        await near.connect(far, [address])
        await trio.sleep(1)
        child.send_signal(signal.SIGSTOP)
        with trio.fail_after(limits.ping_interval_s + limits.silence_s + 2):
            while near.peers():  # noqa: ASYNC110
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
