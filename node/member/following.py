"""A member's way from one swarm to its successor: what it writes down, and what of the old swarm's bits it takes along.

The succession is written into what the home keeps of the old swarm before the member leaves that. So a machine that is
started again with its old ticket goes to the new swarm at once, as long as its home is there. The bits of the old
replica are the base of the new one: only blocks that differ are fetched.
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
"""Successions in a row: more than keys that anybody replaces; a circle ends here."""
PATIENCE_S: Final = 86_400.0
"""How long a member that followed looks for the new seed: it starts when the old one has told everybody, or when its
owner gets to it."""


class Way:
    """Where a ticket leads by now. `ticket`: of the swarm to join. `base`: a checkpoint of its predecessor's bits, None
    where there is none. `followed`: it is another swarm than the first ticket's."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket, self.followed = ticket, False
        self.base: Path | None = None


def ticket_of(sealed: bytes, swarm: bytes) -> Ticket:
    """The ticket that a succession of `swarm` comes to. `PeerError` when it is none, or names no addresses."""
    found = open_successor(sealed, swarm)
    try:
        return Ticket(found.successor, found.addrs, found.capability, found.preset)
    except ValueError as error:
        raise PeerError(f"succession: {error}") from error


def note(store: Store, sealed: bytes) -> None:
    """Write down, durably, that this swarm has a successor. The first one counts."""
    if not store.records.get(_RECORD):
        store.records.put([(_RECORD, sealed)])


def follow(home: Path, ticket: Ticket) -> Way:
    """Where `ticket` leads, by what `home` knows. Raises `UsageError` when another process uses the home."""
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
            raise UsageError(f"{folder} names a successor that makes no sense ({error}): move it away.") from error
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
