"""A relay's process: it passes chunks on, and leads to the seed where that cannot be dialed. No model, no torch.

A seed behind NAT is started with `--via` and this machine's address; it comes to the relay, keeps a place there, and
its tickets name the relay. So a relay whose ticket leads nowhere, or to itself, only has to wait.
"""

import structlog
import trio

from node.host.announce import announced, resolved
from node.host.endpoint import open_store
from node.member import following
from node.member.join import Member
from node.settings import keyfile, logs
from node.settings.config import RelayConfig
from node.settings.contact import dialable
from node.settings.ticket import Ticket
from swarm.runtime import in_thread

__all__ = ["run"]

_log = structlog.get_logger(__name__)


async def run(
    ticket: Ticket, config: RelayConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run until cancelled. Raises `UsageError`, or `Unreachable` when no seed answers. Where the swarm gets a new key
    the relay follows."""
    logs.configure()
    config = await in_thread(resolved, announced(config))
    key = keyfile.load_or_make(config.home / keyfile.NODE_KEY)
    while True:
        way = await in_thread(following.follow, config.home, ticket)
        with open_store(config.home, way.ticket.authority) as store:
            member = Member(way, config, key, store)
            async with trio.open_nursery() as nursery:
                await nursery.start(member.run)
                place = next(iter(config.announce or dialable(member.endpoint.addrs)))
                _log.info("relaying", hint=f"a seed or node that cannot be dialed reaches the world with --via {place}")
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
