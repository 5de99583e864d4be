"""What a person may do about members and tickets while the seed does not run: on its home directly.

Whoever does it holds the store's lock, so a seed cannot start meanwhile, and where one runs already nothing happens
here. What is written are the records that the seed would have written; it reads them at its next start.
"""

import time
from pathlib import Path
from typing import Any, Final

from node.coordinator.admin import listed
from node.host.endpoint import store_folder
from node.settings.contact import Contact
from node.trainers.messages import Evict, Evicted
from swarm.protocol.core.documents import AuthorityTime, Grant, open_grant
from swarm.protocol.member import BAN_S
from swarm.protocol.membership.enrolment import open_record
from swarm.protocol.membership.tickets import Tickets
from swarm.store import Records, records_of
from swarm.transport.identity import peer_id

__all__ = ["put_out", "standing"]

_BARS: Final = ("bar/", "kick/")


def standing(home: Path) -> dict[str, Any]:
    """Who had a lease when the seed ended, and how tickets stand: of what a running seed says, `swarm`, `nodes`,
    `tickets` and `barred`. Raises `UsageError` when another process uses the home, or no seed has."""
    authority = Contact.read(home).authority
    with records_of(store_folder(home, authority)) as records:
        leases = _leases(records, authority)
        tickets = _tickets(records, leases)
    nodes = [{"peer": peer_id(grant.peer), "name": name} for grant, name in leases]
    return {"swarm": peer_id(authority), "nodes": nodes, **listed(tickets)}


def put_out(home: Path, asked: Evict) -> Evicted:
    """Do as a running seed would; durable on return. Raises `UsageError` as `standing` does."""
    authority = Contact.read(home).authority
    with records_of(store_folder(home, authority)) as records:
        leases = _leases(records, authority)
        tickets = _tickets(records, leases)
        made: list[tuple[str, bytes]] = []
        if asked.ticket:
            changed = tickets.revoke(asked.ticket, undo=asked.undo)
            out = [grant for grant, _ in leases if grant.capability == asked.ticket and not asked.undo]
            made.append((f"ticket/{asked.ticket.hex()}", tickets.record(asked.ticket)))
        elif asked.for_good:
            changed = tickets.bar(asked.peer, undo=asked.undo)
            out = [grant for grant, _ in leases if grant.peer == asked.peer and not asked.undo]
            made.append((f"bar/{asked.peer.hex()}", tickets.bar_record(asked.peer)))
            made.append((f"kick/{asked.peer.hex()}", tickets.kick_record(asked.peer)))
        else:
            out = [grant for grant, _ in leases if grant.peer == asked.peer]
            changed = bool(out)
            if changed:
                tickets.kick(asked.peer, AuthorityTime(time.time() + BAN_S))  # as the seed reads its clock at a start
                made.append((f"kick/{asked.peer.hex()}", tickets.kick_record(asked.peer)))
        records.put([*made, *((f"grant/{grant.slot}", b"") for grant in out)])
    return Evicted(changed, [grant.peer for grant in out])


def _leases(records: Records, authority: bytes) -> list[tuple[Grant, str]]:
    """Grants on disk, each with its holder's name; by slot."""
    opened = [open_record(record) for record in records.all("grant/").values() if record]
    grants = [(open_grant(sealed, authority), enrolment.join.name) for sealed, enrolment in opened]
    return sorted(grants, key=lambda pair: pair[0].slot)


def _tickets(records: Records, leases: list[tuple[Grant, str]]) -> Tickets:
    tickets = Tickets()
    bars = [record for kind in _BARS for record in records.all(kind).values() if record]
    tickets.restore(records.all("ticket/").values(), bars)
    for grant, _ in leases:
        tickets.resume(grant.capability, grant.peer)
    return tickets
