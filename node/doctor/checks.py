"""Runs the probes that a ticket and a config ask for, and gathers what they found."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Final

import trio

from codec.errors import PeerError, UsageError
from codec.sign import Key
from node.doctor.facts import Facts, TicketFacts
from node.doctor.machine import look_at_machine
from node.doctor.visit import visit
from node.host.announce import resolved, with_box_ports
from node.settings import keyfile
from node.settings.config import JoinConfig
from node.settings.ticket import Ticket
from node.status.query import ask
from swarm.protocol.core.documents import open_capability
from swarm.transport.base import Unreachable
from swarm.transport.identity import peer_id

__all__ = ["gather"]

ASK_S: Final = 2.0
"""For a node that runs in this home to answer."""


async def gather(
    ticket_text: str,
    config: JoinConfig,
    *,
    environment: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.time,
) -> Facts:
    """The facts about this machine and, with a ticket, about the swarm. `clock`: this machine's Unix time.

    The visit uses the home's own node key, made if there is none, so that a ticket for a number of machines counts this
    one once. While a node runs in this home the swarm is not visited, since the visit would take over its lease.
    Raises `UsageError` for a host name that leads nowhere.
    """
    config = await trio.to_thread.run_sync(resolved, with_box_ports(config, environment))
    machine = await trio.to_thread.run_sync(
        lambda: look_at_machine(config, environment=environment, clock=clock)
    )  # fmt: skip
    ticket, known, wrong = _read_ticket(ticket_text)
    running = await trio.to_thread.run_sync(_running, config)
    found = None
    if ticket is not None and not running:
        found = await visit(ticket, config, _key(config), clock=clock)
    return Facts(
        machine=machine, engine=config.engine, device=config.device, engines=config.engines, tp=config.tp,
        replica=config.replica, ticket=known, ticket_error=wrong, running=running, visit=found,
    )  # fmt: skip


def _read_ticket(text: str) -> tuple[Ticket | None, TicketFacts | None, str]:
    """The ticket, what is in it, and why it cannot be read. All three are empty for an empty text."""
    if not text:
        return None, None, ""
    try:
        ticket = Ticket.parse(text)
        capability = open_capability(ticket.capability, ticket.authority)
    except UsageError as error:
        return None, None, str(error)
    except PeerError as error:
        return None, None, f"the ticket is not signed by the swarm that it names ({error})"
    known = TicketFacts(
        swarm=peer_id(ticket.authority), addrs=ticket.addrs, expires=float(capability.expires),
        nodes=capability.nodes, quota_bytes=capability.quota_bytes,
    )  # fmt: skip
    return ticket, known, ""


def _running(config: JoinConfig) -> str:
    """A sentence when a process of ours runs in this home; else empty."""
    try:
        ask(config.home, within_s=ASK_S)
    except Unreachable:
        return ""
    return "a node runs in this home already: swarm-node status shows how it is doing"


def _key(config: JoinConfig) -> Key:
    """The key of this machine; a key for this visit only where the home cannot hold one (the rules say why)."""
    try:
        return keyfile.load_or_make(config.home / keyfile.NODE_KEY)
    except (UsageError, OSError):
        return Key.generate()
