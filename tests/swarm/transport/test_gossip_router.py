"""The heartbeat of the gossip router: each second after a change, seldom while nothing changes."""

from contextlib import suppress

import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.exceptions import NoPubsubAttached
from libp2p.pubsub.pb import rpc_pb2

from swarm.transport.gossip_router import QuietRouter

PROTOCOL = TProtocol("/meshsub/1.1.0")
NEIGHBOUR = ID(b"neighbour")


class Counted(QuietRouter):
    """A router that only notes its heartbeats."""

    def __init__(self) -> None:
        super().__init__(protocols=[PROTOCOL], degree=6, degree_low=4, degree_high=12, heartbeat_interval=1)
        self.beats_at: list[float] = []

    async def _beat(self) -> None:
        self.beats_at.append(trio.current_time())


async def test_a_quiet_router_beats_seldom_and_a_change_brings_it_back(autojump_clock: trio.testing.MockClock) -> None:
    router = Counted()
    with trio.move_on_after(100):
        await router.heartbeat()
    assert len(router.beats_at) < 5 + 100 / 5 + 1
    router.beats_at.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(router.heartbeat)
        await trio.sleep(60.5)
        quiet, changed_at = len(router.beats_at), trio.current_time()
        router.add_peer(NEIGHBOUR, PROTOCOL)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    after = [at - changed_at for at in router.beats_at[quiet:]]
    assert after[0] <= 1.01
    assert sum(at <= 5.01 for at in after) == 5


async def test_each_kind_of_change_counts(autojump_clock: trio.testing.MockClock) -> None:
    async def lost_and_found(router: Counted) -> None:
        router.add_peer(NEIGHBOUR, PROTOCOL)
        router.remove_peer(NEIGHBOUR)

    async def pruned(router: Counted) -> None:
        await router.handle_prune(rpc_pb2.ControlPrune(topicID="t", backoff=60), NEIGHBOUR)

    async def said(router: Counted) -> None:
        message = rpc_pb2.Message(data=b"x", from_id=b"a", seqno=b"1", topicIDs=["t"])
        with suppress(NoPubsubAttached):  # it has none to send to
            await router.publish(NEIGHBOUR, message)

    for change in (lost_and_found, pruned, said):
        router = Counted()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.heartbeat)
            await trio.sleep(30.5)
            quiet, changed_at = len(router.beats_at), trio.current_time()
            await change(router)
            await trio.sleep(1.1)
            nursery.cancel_scope.cancel()
        assert len(router.beats_at) == quiet + 1, change.__name__
        assert router.beats_at[-1] - changed_at <= 1.01
