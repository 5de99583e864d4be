"""py-libp2p's GossipSub router with a heartbeat that costs nothing while nothing happens.

The library's heartbeat does all of its work each time, and each time it may replace neighbours in the mesh by others
that it scores higher: an idle peer among 24 then sent and received 0.7 control frames a second. Ours follows the
specification for a few beats after each change, and is slow otherwise; the mesh changes only when it has too few or too
many neighbours.
"""

from typing import Any, Final

import trio
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2

__all__ = ["QuietRouter"]

_QUIET_BEAT_S: Final = 5.0
"""Time between two heartbeats of a quiet router: bounds how long a mesh that has too few neighbours, with none of the
changes that we see, stays so."""
_BEATS_AFTER_CHANGE: Final = 5
"""The router keeps messages for so many heartbeats (the library's `history_size`), and offers them to others for three
of these."""


class QuietRouter(GossipSub):
    """GossipSub for one topic. Its heartbeat comes each `heartbeat_interval` until `_BEATS_AFTER_CHANGE` after the last
    change: a message, a neighbour that comes or leaves, or one that enters or leaves the mesh."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._beats_left = _BEATS_AFTER_CHANGE
        self._changed = trio.Event()

    async def heartbeat(self) -> None:
        """Replaces the library's loop."""
        await trio.sleep(self.heartbeat_initial_delay)
        while True:
            self._beats_left = max(0, self._beats_left - 1)
            await self._beat()
            if not self._beats_left:
                with trio.move_on_after(_QUIET_BEAT_S - self.heartbeat_interval):
                    await self._changed.wait()
            await trio.sleep(self.heartbeat_interval)

    async def _beat(self) -> None:
        """What the library does in each heartbeat, without the search for better neighbours."""
        grafts, prunes = self.mesh_heartbeat()
        self.fanout_heartbeat()
        await self._emit_control_msgs(grafts, prunes, self.gossip_heartbeat())
        self.mcache.shift()
        if self.scorer is not None:
            self.scorer.on_heartbeat()
        self._periodic_security_cleanup()
        self._prune_idontwant_entries()

    def _perform_opportunistic_grafting(self, topic: str, peers_to_graft: Any) -> int:
        """Part of the library's search for better neighbours: none is grafted."""
        return 0

    def _note_change(self) -> None:
        self._beats_left = _BEATS_AFTER_CHANGE
        self._changed.set()
        self._changed = trio.Event()

    # What counts as a change. The library calls these.

    def add_peer(self, peer_id: ID, protocol_id: Any) -> None:
        super().add_peer(peer_id, protocol_id)
        self._note_change()

    def remove_peer(self, peer_id: ID) -> None:
        super().remove_peer(peer_id)
        self._note_change()

    async def publish(self, msg_forwarder: ID, pubsub_msg: rpc_pb2.Message) -> None:
        self._note_change()
        await super().publish(msg_forwarder, pubsub_msg)

    async def handle_graft(self, graft_msg: rpc_pb2.ControlGraft, sender_peer_id: ID) -> None:
        self._note_change()
        await super().handle_graft(graft_msg, sender_peer_id)

    async def handle_prune(self, prune_msg: rpc_pb2.ControlPrune, sender_peer_id: ID) -> None:
        self._note_change()
        await super().handle_prune(prune_msg, sender_peer_id)
