"""Who is let in, and who is shown out: a person's word about members and tickets, at the seed."""

from collections.abc import Callable
from typing import Any

from node.trainers.messages import Evict, Evicted
from swarm.protocol.authority import Authority
from swarm.protocol.membership.tickets import Tickets
from swarm.runtime import Runtime
from swarm.transport.identity import peer_id

__all__ = ["AdminService", "listed"]


class AdminService:
    """Of a running seed."""

    def __init__(self, core: Authority, runtime: Runtime, clock: Callable[[], float]) -> None:
        self._core, self._runtime, self._clock = core, runtime, clock

    async def put_out(self, asked: Evict) -> Evicted:
        """Do it; answered when it is durable."""
        core, before = self._core, dict(self._core.book.slot_of)
        now, ticket = self._clock(), core.book.tickets.get(asked.ticket)
        if asked.ticket:
            changed = (ticket is not None and ticket.revoked) == asked.undo
            effects = core.revoke(asked.ticket, now, undo=asked.undo)
        elif asked.for_good:
            changed = (asked.peer in core.book.tickets.barred) == asked.undo
            effects = core.bar(asked.peer, now, undo=asked.undo)
        else:
            changed = asked.peer in before
            effects = core.kick(asked.peer, now)
        await self._runtime.carry_out(effects)
        return Evicted(changed, [peer for peer in before if peer not in core.book.slot_of])

    def state(self) -> dict[str, Any]:
        """Plain values for `status`: `tickets` that were used or revoked, `barred` peers."""
        return listed(self._core.book.tickets)


def listed(tickets: Tickets) -> dict[str, Any]:
    """Plain values: `tickets` that were used or revoked, `barred` peers."""
    return {
        "tickets": [
            {
                "id": ticket.id.hex(),
                "expires": ticket.expires,
                "nodes": ticket.nodes,
                "nodes_ever": ticket.nodes_ever,
                "here": len(ticket.here),
                "ever": ticket.ever,
                "peers": [peer_id(peer) for peer in sorted(ticket.peers)],
                "quota_bytes": ticket.quota_bytes,
                "fetched_bytes": ticket.fetched_bytes,
                "revoked": ticket.revoked,
            }
            for ticket in tickets
        ],
        "barred": [peer_id(peer) for peer in tickets.barred],
    }
