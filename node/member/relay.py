"""A relay's process: it passes chunks on, and connects members to a seed that cannot be dialed. Without a model.

A seed behind NAT is started with `--via` and this machine's address; it dials the relay, keeps a reservation there, and
its tickets name the relay. So a relay whose ticket names an address that does not answer, or its own, has to wait.
"""

import structlog
import trio

from node.host.announce import announced, resolved
from node.host.endpoint import open_store
from node.member import following
from node.member.join import Member
from node.settings import keyfile, logs, memory, memory_plan
from node.settings.config import RelayConfig
from node.settings.contact import dialable
from node.settings.ticket import Ticket
from swarm.runtime import in_thread

__all__ = ["run"]

_log = structlog.get_logger(__name__)


async def run(
    ticket: Ticket, config: RelayConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a relay until cancelled. Raises `UsageError`, or `Unreachable` when no seed answers.

    When the swarm gets a new key the relay goes on in the new swarm.
    """
    logs.configure(config.log_level, file=config.log_file)
    memory.give_back_promptly()
    config = await in_thread(resolved, announced(config))
    plan = memory_plan.relay()
    memory_plan.require(
        plan, memory.free_bytes(), "use a machine or container with more, or end something else on this one"
    )
    key = keyfile.load_or_make(config.home / keyfile.NODE_KEY)
    while True:
        way = await in_thread(following.follow, config.home, ticket)
        with open_store(config.home, way.ticket.authority) as store:
            member = Member(way, config, key, store)
            member.memory_plan = lambda: plan
            async with trio.open_nursery() as nursery:
                await nursery.start(member.run)
                place = next(iter(config.announce or dialable(member.endpoint.addrs)))
                _log.info("relaying", hint=f"start a seed or node that cannot be dialed with --via {place}")
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
