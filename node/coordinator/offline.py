"""Removes members and revokes tickets while the seed does not run, by writing to its home.

The command holds the store's lock meanwhile, so no seed can start, and where one runs the command fails. It writes the
records that a running seed would write; the seed reads them at its next start.
"""

import time
from pathlib import Path
from typing import Final

from node.coordinator.admin import barred_status, ticket_status
from node.host.endpoint import store_folder
from node.settings.contact import Contact
from node.status.schema import MemberStatus, SeedStatus
from node.trainers.messages import Evict, Evicted
from swarm.protocol.core.documents import AuthorityTime, Grant, open_grant
from swarm.protocol.member import BAN_S
from swarm.protocol.membership.enrolment import open_record
from swarm.protocol.membership.tickets import Tickets
from swarm.store import Records, records_of
from swarm.transport.identity import peer_id

__all__ = ["evict", "status"]

_BAR_KINDS: Final = ("bar/", "kick/")


def status(home: Path) -> SeedStatus:
    """The members that had a lease when the seed ended, and the tickets.

    Of a running seed's status it has `swarm`, `tickets`, `barred`, and `peer` and `name` of each node; the rest are
    defaults. Raises `UsageError` when another process uses the home, or it is no seed's.
    """
    authority = Contact.read(home).authority
    with records_of(store_folder(home, authority)) as records:
        leases = _leases(records, authority)
        tickets = _tickets(records, leases)
    return SeedStatus(
        swarm=peer_id(authority),
        nodes=[MemberStatus(peer=peer_id(grant.peer), name=name) for grant, name in leases],
        tickets=ticket_status(tickets),
        barred=barred_status(tickets),
    )


def evict(home: Path, request: Evict) -> Evicted:
    """As `AdminService.evict` in a running seed; durable on return. Raises `UsageError` as `status` does."""
    authority = Contact.read(home).authority
    with records_of(store_folder(home, authority)) as records:
        leases = _leases(records, authority)
        tickets = _tickets(records, leases)
        changes: list[tuple[str, bytes]] = []
        if request.ticket:
            changed = tickets.revoke(request.ticket, undo=request.undo)
            out = [grant for grant, _ in leases if grant.capability == request.ticket and not request.undo]
            changes.append((f"ticket/{request.ticket.hex()}", tickets.record(request.ticket)))
        elif request.for_good:
            changed = tickets.bar(request.peer, undo=request.undo)
            out = [grant for grant, _ in leases if grant.peer == request.peer and not request.undo]
            changes.append((f"bar/{request.peer.hex()}", tickets.bar_record(request.peer)))
            changes.append((f"kick/{request.peer.hex()}", tickets.kick_record(request.peer)))
        else:
            out = [grant for grant, _ in leases if grant.peer == request.peer]
            changed = bool(out)
            if changed:
                tickets.kick(request.peer, AuthorityTime(time.time() + BAN_S))  # a seed starts with this clock
                changes.append((f"kick/{request.peer.hex()}", tickets.kick_record(request.peer)))
        records.put([*changes, *((f"grant/{grant.slot}", b"") for grant in out)])
    return Evicted(changed, [grant.peer for grant in out])


def _leases(records: Records, authority: bytes) -> list[tuple[Grant, str]]:
    """The grants on disk, each with the name of its holder; by slot."""
    opened = [open_record(record) for record in records.all("grant/").values() if record]
    grants = [(open_grant(sealed, authority), enrolment.join.name) for sealed, enrolment in opened]
    return sorted(grants, key=lambda pair: pair[0].slot)


def _tickets(records: Records, leases: list[tuple[Grant, str]]) -> Tickets:
    tickets = Tickets()
    bars = [record for kind in _BAR_KINDS for record in records.all(kind).values() if record]
    tickets.restore(records.all("ticket/").values(), bars)
    for grant, _ in leases:
        tickets.resume(grant.capability, grant.peer)
    return tickets
