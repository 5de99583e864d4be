"""A standby: a member without an engine that follows the council's log, and becomes the swarm's seed when it leads.

    follow: member (replica) + council (journal)  --elected-->  lead: coordinator + council  --lead lost-->  follow ...

Both live in one home: the member's store of the swarm becomes the seed's, and the journal is the ledger's book.
"""

import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from codec import open_manifest
from codec.errors import PeerError, SwarmError, UsageError
from codec.sign import Key
from node.coordinator.coordinator import Coordinator
from node.coordinator.leading import council_key, lead, with_settings
from node.coordinator.recovery import CHECKPOINTS_KEPT
from node.council.journal import Journal
from node.council.leading import add_pending_seal
from node.council.service import CouncilService, LeadLost
from node.host.announce import announced
from node.host.audit import audit, close
from node.host.endpoint import open_store, store_folder
from node.ledger.book import LEDGER, Book
from node.member import following
from node.member.join import Member, OpenedModel
from node.settings import keyfile, logs
from node.settings.council import council_addresses
from node.settings.memory import give_back_promptly
from node.settings.standby_config import StandbyConfig
from node.settings.ticket import Ticket
from swarm.protocol.core.documents import Capability, seal
from swarm.protocol.core.events import Damaged, VersionId
from swarm.protocol.council.timing import TIMINGS
from swarm.runtime import in_thread
from swarm.runtime.replica.model import Model
from swarm.runtime.replica.replay import Mismatch, listed_chunks
from swarm.store import Store

__all__ = ["REQUEST_FILE", "run"]

_log = structlog.get_logger(__name__)
REQUEST_FILE: Final = "takeover.request"
"""In the home: a person wants this machine to lead (`swarm-node takeover`)."""
_LOOK_S: Final = 0.2
_OWN_TICKET_S: Final = 366 * 86_400.0
"""For how long a standby that runs on can join again: it makes a new one at each start."""


async def run(
    ticket: Ticket, config: StandbyConfig, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Follow and lead until cancelled. Raises `UsageError` for what the user can correct."""
    logs.configure(config.log_level, file=config.log_file)
    give_back_promptly()
    config = announced(config)
    config.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = keyfile.load(config.key or config.home / keyfile.AUTHORITY_KEY)
    if key.public != ticket.authority:
        raise UsageError(
            "The key of this machine is not that of the ticket's swarm: copy authority.key from the seed's machine, "
            "and give it with --key."
        )
    machines = council_addresses(config.council)
    standby_key = council_key(config.home, machines)
    with contextlib.closing(await in_thread(Book, config.home / LEDGER)) as book:
        journal = await in_thread(Journal, config.home, book)
        council = CouncilService(config.home, standby_key, machines, journal, TIMINGS[ticket.preset])
        async with trio.open_nursery() as nursery:
            await nursery.start(council.run)
            nursery.start_soon(_pass_requests_on, config.home, council)
            while True:
                await _Following(ticket, config, key, council).run(task_status)
                task_status = trio.TASK_STATUS_IGNORED
                with contextlib.suppress(LeadLost):
                    await _lead(ticket, config, key, council, book)


async def _pass_requests_on(home: Path, council: CouncilService) -> None:
    while True:
        await trio.sleep(_LOOK_S)
        if (home / REQUEST_FILE).exists():
            (home / REQUEST_FILE).unlink(missing_ok=True)
            await council.take_over()


class _Following:
    """One time of following: a running member, until this machine leads and has the newest version."""

    def __init__(self, ticket: Ticket, config: StandbyConfig, key: Key, council: CouncilService) -> None:
        """`key`: the swarm's."""
        self._ticket, self._config, self._key, self._council = ticket, config, key, council

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        config = self._config.as_member()
        node_key = await in_thread(keyfile.load_or_make, config.home / keyfile.NODE_KEY)
        with open_store(config.home, self._ticket.authority) as store:
            model = Model(store, base=config.model)
            found = await in_thread(model.restore) or model.nearly
            layout_hash = None if found is None or model.layout is None else model.layout.hash
            opened = OpenedModel(model, None if found is None else found.manifest, layout_hash)
            member = Member(following.Way(self._own_ticket()), config, node_key, store, opened)

            async def refetch(blocks: int) -> None:
                await member.endpoint.runtime.post(Damaged(blocks))

            async def holds(sealed: bytes) -> bool:
                return await self._holds(member, store, sealed)

            self._council.holds = holds
            self._council.core.may_lead = False
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(member.run)
                    task_status.started()
                    nursery.start_soon(audit, model, refetch)
                    if model.nearly is not None:
                        await refetch(model.lost)
                    nursery.start_soon(self._watch_whether_it_may_lead, holds)
                    await self._council.wait_leading()
                    await self._reach_newest(member, model, store)
                    nursery.cancel_scope.cancel()
            finally:
                self._council.holds = None
                await close(model)

    async def _watch_whether_it_may_lead(self, holds: Callable[[bytes], Awaitable[bool]]) -> None:
        """A machine without the newest version could not serve it, and would keep one that has it from leading."""
        while True:
            sealed = (await in_thread(self._council.journal.records)).get("seal")
            self._council.core.may_lead = sealed is not None and await holds(sealed)
            await trio.sleep(_LOOK_S)

    def _own_ticket(self) -> Ticket:
        """A ticket for this machine alone, signed here: that of the command may have expired since."""
        ticket, key = self._ticket, self._key
        expires = time.time() + _OWN_TICKET_S
        capability = Capability(key.public, secrets.token_bytes(16), expires, 1, 0, 1)
        return Ticket(ticket.authority, ticket.addrs, seal(capability, key), ticket.preset)

    async def _holds(self, member: Member, store: Store, sealed: bytes) -> bool:
        """Whether all chunks of the version are on disk here."""
        try:
            manifest = open_manifest(sealed, self._ticket.authority)
            id_ = VersionId(manifest.epoch, manifest.version)
            if member.core.state.held is not None and member.core.state.held >= id_:
                return True
            if not all(chunk.whole for chunk in listed_chunks(store.chunks, manifest)):
                return False
        except (PeerError, Mismatch):
            return False
        await in_thread(store.chunks.sync, id_, manifest.attempt)
        return True

    async def _reach_newest(self, member: Member, model: Model, store: Store) -> None:
        """Reach the newest version that the council established: its seal may not have come to any member yet."""
        sealed = (await in_thread(self._council.journal.records)).get("seal")
        if sealed is None:
            raise SwarmError("The council's log names no version. Start the seed that founded it.")
        manifest = open_manifest(sealed, self._ticket.authority)
        newest = VersionId(manifest.epoch, manifest.version)
        await member.endpoint.runtime.take_gossip(sealed)
        while True:
            committed = member.next_commit
            if model.version is not None and model.version >= newest:
                break
            await committed.wait()
        kept = {saved.version for saved in store.checkpoints.list()}
        if model.version not in kept and not _leads_to(store, newest):
            await in_thread(model.write_checkpoint)


def _leads_to(store: Store, newest: VersionId) -> bool:
    """Whether a restart finds this version in the store."""
    recovery = store.recover()
    return recovery.checkpoint is not None and bool(recovery.replay) and recovery.replay[-1].id == newest


async def _lead(ticket: Ticket, config: StandbyConfig, key: Key, council: CouncilService, book: Book) -> None:
    """Be the seed until this machine leads no more; then raise `LeadLost`."""
    with open_store(config.home, key.public, checkpoints_kept=CHECKPOINTS_KEPT) as store:
        records = await in_thread(council.journal.records)
        await in_thread(add_pending_seal, store, records, key.public)
        seed_config = with_settings(config.as_seed(ticket.preset, store_folder(config.home, key.public)), records)
        model = Model(store)
        found = await in_thread(model.restore)
        if found is None:
            raise SwarmError(f"{store.folder} is damaged: it does not lead to the version that this machine held.")

        async def serve(boot: int) -> None:
            await Coordinator(seed_config, key, store, model, found.manifest, boot, book).run(trio.TASK_STATUS_IGNORED)

        try:
            await lead(seed_config, council, key.public, store, book, serve)
        finally:
            await close(model)
