"""Memory that a peer makes the seed hold: full windows of unread streams, and frames that are never complete."""

import pytest
import trio
from arena_kit import FULL, MIB, Arena, observed
from peer_kit import Member
from stranger_kit import BROKEN, StreamFiller, certificate, context, quietly, secured

from codec import ChunkKey
from codec.sign import Key
from swarm.protocol.core.wire import NO_STRIPE, Frame, FrameKind, pack_frame

pytestmark = [pytest.mark.slow, pytest.mark.adversary, pytest.mark.alone]

CONNECTIONS = 8
STREAMS = 120
MOST = 64 * MIB
HALF_A_FRAME = pack_frame(Frame(FrameKind.HEADER, NO_STRIPE, ChunkKey(0, 1, 0, 0), 0, 0, 0, 1 << 20))
FILLS = {
    "unread echoes": ("/ipfs/ping/1.0.0", b"x"),
    "incomplete frames": ("/swarm-node/bulk/1", HALF_A_FRAME[:1]),
    "incomplete gossip": ("/meshsub/1.1.0", b"\xff"),
    "incomplete identities": ("/ipfs/id/push/1.0.0", b"\xff"),
    "incomplete control messages": ("/swarm-node/control/1", b"\0\0\x10"),
}


@pytest.mark.parametrize("what", list(FILLS) if FULL else list(FILLS)[:1])
@pytest.mark.parametrize("who", ["stranger", "member"] if FULL else ["stranger"])
async def test_unread_streams_use_bounded_memory(arena: Arena, what: str, who: str) -> None:
    """Over several connections, with 120 streams each, whose windows the peer fills."""
    key = Key(b"\x88" * 32)
    member = Member(key, arena.ticket)
    async with observed(arena) as observer, member.running(), trio.open_nursery() as nursery:
        if who == "member":
            assert await member.enter()
            nursery.start_soon(member.live)
        shown, fillers = context(certificate(key)), []
        before, worst = arena.process().rss_bytes, 0
        for _ in range(CONNECTIONS):
            with quietly(*BROKEN):
                fillers.append(StreamFiller(await secured(arena.seed_port, shown), STREAMS, *FILLS[what]))
                nursery.start_soon(fillers[-1].run)
        observer.reset()
        with trio.move_on_after(8):
            while True:
                worst = max(worst, arena.process().rss_bytes - before)
                await trio.sleep(0.1)
        sent = sum(hoard.sent_bytes for hoard in fillers)
        nursery.cancel_scope.cancel()
    print(who, what, f"{worst / MIB:.0f} MiB, by {sent / MIB:.0f} MiB sent")
    assert worst <= MOST, f"{worst / MIB:.0f} MiB, by {sent / MIB:.0f} MiB sent"
    assert arena.honest_leases_lost() == []
    await arena.lets_in()
