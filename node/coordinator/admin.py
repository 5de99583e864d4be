"""Removes members, revokes tickets and undoes both, in a running seed."""

from collections.abc import Callable

from node.status.schema import TicketStatus
from node.trainers.messages import Evict, Evicted
from swarm.protocol.authority import Authority
from swarm.protocol.membership.tickets import Tickets
from swarm.runtime import Runtime
from swarm.transport.identity import peer_id

__all__ = ["AdminService", "barred_status", "ticket_status"]


class AdminService:
    """Carries out what a person asks by `swarm-node kick` and `revoke`."""

    def __init__(self, core: Authority, runtime: Runtime, clock: Callable[[], float]) -> None:
        self._core, self._runtime, self._clock = core, runtime, clock

    async def evict(self, request: Evict) -> Evicted:
        """Remove a member, or revoke a ticket or a member, or undo that. Returns when it is durable."""
        core, before = self._core, dict(self._core.book.slot_of)
        now, ticket = self._clock(), core.book.tickets.get(request.ticket)
        if request.ticket:
            changed = (ticket is not None and ticket.revoked) == request.undo
            effects = core.revoke(request.ticket, now, undo=request.undo)
        elif request.for_good:
            changed = (request.peer in core.book.tickets.barred) == request.undo
            effects = core.bar(request.peer, now, undo=request.undo)
        else:
            changed = request.peer in before
            effects = core.kick(request.peer, now)
        await self._runtime.carry_out(effects)
        return Evicted(changed, [peer for peer in before if peer not in core.book.slot_of])


def ticket_status(tickets: Tickets) -> list[TicketStatus]:
    """Tickets that were used or revoked, by their ids."""
    return [
        TicketStatus(
            id=ticket.id.hex(),
            expires=ticket.expires,
            nodes=ticket.nodes,
            nodes_ever=ticket.nodes_ever,
            here=len(ticket.here),
            ever=ticket.ever,
            peers=[peer_id(peer) for peer in sorted(ticket.peers)],
            quota_bytes=ticket.quota_bytes,
            fetched_bytes=ticket.fetched_bytes,
            revoked=ticket.revoked,
        )
        for ticket in tickets
    ]


def barred_status(tickets: Tickets) -> list[str]:
    """PeerIds of the members that were revoked."""
    return [peer_id(peer) for peer in tickets.barred]
