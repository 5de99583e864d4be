"""A member's move from one swarm to its successor: what it records, and which bits it keeps.

The succession is recorded in the home's store of the old swarm before the member leaves that swarm. So a machine that
is started again with its old ticket joins the new swarm at once, as long as it has its home. The old replica is the
base of the new one: only blocks that differ are fetched.
"""

from pathlib import Path
from typing import Final

import structlog

from codec.errors import PeerError, UsageError
from node.host.endpoint import store_folder
from node.settings.ticket import Ticket
from swarm.protocol.membership.succession import open_successor
from swarm.store import Store, drop_bits, kept_checkpoint, records_of

__all__ = ["PATIENCE_S", "Way", "follow", "note", "ticket_of"]

_log = structlog.get_logger(__name__)
_RECORD: Final = "succession"
_MAX_STEPS: Final = 64
"""Successions in a row: more than any swarm has. Ends a circle of them."""
PATIENCE_S: Final = 86_400.0
"""How long a member that followed looks for the new seed, which starts after the old one has told all members, or when
its owner starts it."""


class Way:
    """Where a ticket leads now. `ticket`: of the swarm to join. `base`: a checkpoint of the predecessor's bits, if
    there is one. `followed`: it is not the swarm of the original ticket."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket, self.followed = ticket, False
        self.base: Path | None = None


def ticket_of(sealed: bytes, swarm: bytes) -> Ticket:
    """The ticket in a succession of `swarm`. Raises `PeerError` when it is not valid or names no addresses."""
    found = open_successor(sealed, swarm)
    try:
        return Ticket(found.successor, found.addrs, found.capability, found.preset)
    except ValueError as error:
        raise PeerError(f"succession: {error}") from error


def note(store: Store, sealed: bytes) -> None:
    """Record durably that this swarm has a successor. The first one counts."""
    if not store.records.get(_RECORD):
        store.records.put([(_RECORD, sealed)])


def follow(home: Path, ticket: Ticket) -> Way:
    """Where `ticket` leads, by the successions recorded in `home`. Raises `UsageError` when another process uses the
    home."""
    way, left = Way(ticket), list[Path]()
    for _ in range(_MAX_STEPS):
        folder = store_folder(home, way.ticket.authority)
        if not (folder / "swarm.sqlite").exists():
            break
        with records_of(folder) as records:
            sealed = records.get(_RECORD)
        if not sealed:
            break
        try:
            way.ticket = ticket_of(sealed, way.ticket.authority)
        except PeerError as error:
            raise UsageError(f"{folder} names an invalid successor ({error}): move that folder away.") from error
        way.followed = True
        left.append(folder)
        way.base = kept_checkpoint(folder) or way.base
    if way.followed:
        _log.info("follows", old=ticket.authority, new=way.ticket.authority)
    if kept_checkpoint(store_folder(home, way.ticket.authority)) is not None:
        for folder in left:
            drop_bits(folder)
        way.base = None
    return way
