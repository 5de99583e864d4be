"""Attacks on a version on its way: unrequested frames, uninvited children, and a trainer killed while it publishes."""

import signal
import time
from pathlib import Path
from statistics import median

import pytest
import trio
from arena_kit import PASSES, Arena, arena_in
from kit import checkpoint, holds, root_of, step, weights
from peer_kit import Member, members
from proxy_kit import proxied

from codec.sign import Key
from node.host.port import free_port
from scenarios.harness.swarm import NODE, swarm_in
from swarm.protocol.core.wire import FRAME_HEAD, FrameKind, pack_frame, unpack_frame_head
from swarm.transport.base import Lane

pytestmark = [pytest.mark.slow, pytest.mark.adversary, pytest.mark.alone]

REPAIRED_S = 8.0
"""Seconds. Pulls begin 0.5 s after a stripe stops; a dead connection is noticed only after 20 s."""
PUBLISHES_WITHIN_S = 20.0
"""Seconds until a publishing command has begun, on a busy machine."""


def until_publishing(arena: Arena, times: int) -> None:
    """Wait until the seed has begun so many publishes. One takes some hundredths of a second, so it looks often."""
    deadline = time.monotonic() + PUBLISHES_WITHIN_S
    while arena.log().count('"publishing"') < times:
        assert time.monotonic() < deadline, "the publish has not begun"
        time.sleep(0.001)


def frames_of(bulk: bytes) -> list[tuple[bytes, int]]:
    """The complete frames of pieces and headers in the bytes of a bulk stream: (frame, its decoded head)."""
    found, at = [], 0
    while at + FRAME_HEAD <= len(bulk):
        head = unpack_frame_head(bulk[at : at + FRAME_HEAD])
        end = at + FRAME_HEAD + head.length
        if end <= len(bulk) and head.kind in (FrameKind.HEADER, FrameKind.PIECE):
            found.append((bulk[at:end], head))
        at = end
    return found


async def repeat_frames(member: Member, box: bytes, frames: list) -> None:
    """Send old, validly signed pieces under every stripe, ten times a second."""
    stream = await member.transport.open_stream(box, Lane.BULK)
    while True:
        for stripe in range(8):
            frame, head = frames[stripe % len(frames)]
            await stream.send_all(pack_frame(head._replace(stripe=stripe)) + frame[FRAME_HEAD:])
        await trio.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("attacked", [False, True])
async def test_13_unrequested_frames_do_not_count_as_progress(tmp_path: Path, attacked: bool) -> None:
    """The proxy holds back the seed's frames for the box, so the box must pull them from another node. A member
    meanwhile sends old pieces under every stripe, as if all stripes made progress."""
    with swarm_in(tmp_path) as swarm:
        arena, outside = Arena(swarm, weights(tensors=24, elements=120_000)), free_port()
        async with proxied(outside, arena.seed_port) as proxy, trio.open_nursery() as nursery:
            await trio.to_thread.run_sync(lambda: arena.start(announce=outside))
            of_box = len(proxy.brought)
            swarm.start("other", "join", arena.ticket, *NODE)
            await trio.to_thread.run_sync(swarm.until, "other", holds(root_of(arena.words)))
            member = Member(Key(b"\x13" * 32), arena.ticket)
            member.keeps_bulk = True
            async with member.running():
                assert await member.enter()
                nursery.start_soon(member.live)
                await member.attach(*range(8))
                await arena.works()
                await trio.sleep(0.5)
                frames = frames_of(member.bulk)
                assert frames, "the member was pushed nothing"
                if attacked:
                    await member.greet(arena.box_public, arena.box_port)
                    nursery.start_soon(repeat_frames, member, arena.box_public, frames)
                    await trio.sleep(0.5)
                # The version will come over the connection that brought the model to the box.
                proxy.held_back = {i for i in range(of_box) if proxy.brought[i] > 200_000}
                assert proxy.held_back
                began = trio.current_time()
                await arena.works()
                assert trio.current_time() - began < REPAIRED_S
                nursery.cancel_scope.cancel()
        arena.unharmed()


async def test_uninvited_children_of_the_seed(tmp_path: Path) -> None:
    """Ten members that the plan gives other parents attach to the seed in all stripes: its planned children are served
    first."""
    with arena_in(tmp_path, words=weights(tensors=32, elements=480_000), density=0.1, up_mbit=30.0) as arena:
        async with members(arena.ticket, 10) as sybils, trio.open_nursery() as nursery:
            for each in sybils:
                nursery.start_soon(each.live)
                await each.attach(0, credit=0)
            await trio.sleep(2)
            await arena.flight_s()
            quiet = [await arena.flight_s() for _ in range(PASSES)]
            for each in sybils:
                await each.attach(*range(8))
            await trio.sleep(1)
            loud = [await arena.flight_s() for _ in range(PASSES)]
            nursery.cancel_scope.cancel()
        print(quiet, loud)
        assert median(loud) <= 1.3 * median(quiet) + 0.15, (quiet, loud)
        arena.unharmed()


async def test_21_trainer_killed_in_mid_publish(arena: Arena) -> None:
    """No chunk of the dead attempt is pushed any more, and the next version is published as usual."""
    before = arena.log().count('"publishing"')
    for number in range(10):
        words = step(arena.words, 77 + number, density=0.6)
        folder = checkpoint(arena.swarm.folder / f"dead_{number}", words)
        arena.swarm.start("trainer", "publish", str(folder), SWARM_HOME=str(arena.swarm.home("seed")))
        await trio.to_thread.run_sync(until_publishing, arena, before + number + 1)
        arena.swarm.running["trainer"].send_signal(signal.SIGKILL)
        arena.swarm.running.pop("trainer").wait()
        await trio.sleep(0.5)
        if arena.swarm.state("seed")["head"] == [0, arena.version]:
            break
        arena.version, arena.words = arena.version + 1, words  # it was over before it could be killed
    else:
        pytest.skip("each publication was over before it could be killed")
    member = Member(Key(b"\x21" * 32), arena.ticket)
    async with member.running(), trio.open_nursery() as nursery:
        assert await member.enter()
        nursery.start_soon(member.live)
        await member.attach(*range(8))
        await trio.sleep(2)
        assert member.bulk_bytes < 1000, "chunks of a dead attempt are still pushed"
        await arena.works()
        nursery.cancel_scope.cancel()
    steps = arena.swarm.state("seed")["steps"]
    assert steps[-1]["version"] == [0, arena.version]
    assert steps[-1]["trainer_copies"] < 4
