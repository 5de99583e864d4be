"""A relay's process: it passes chunks on. No model, no GPU, no torch."""

import trio

from node import keyfile, logs
from node.config import RelayConfig
from node.endpoint import open_store
from node.join import Member
from node.ticket import Ticket

__all__ = ["run"]


async def run(
    ticket: Ticket, config: RelayConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run until cancelled. Raises `UsageError`, or `Unreachable` when no seed answers."""
    logs.configure()
    key = keyfile.load_or_make(config.home / keyfile.NODE_KEY)
    with open_store(config.home, ticket.authority) as store:
        await Member(ticket, config, key, store, relay=True).run(task_status)
