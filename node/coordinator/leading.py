"""A seed in a council: it serves while its machine leads, and stops before another one begins.

`swarm-node seed --council` founds the council, or leads it again; a standby that takes over comes here too
(`node.member.standby`).
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import trio

from codec.errors import UsageError
from codec.sign import Key
from node.council.journal import Journal
from node.council.kept import KEEP_REQUEST, Kept
from node.council.leading import founding_records, replicated, take_records
from node.council.service import CouncilService, LeadLost
from node.host.announce import reached_at
from node.ledger.book import Book
from node.settings import keyfile
from node.settings.config import SeedConfig
from node.settings.contact import Contact
from node.settings.council import COUNCIL_KEY, CouncilAddress, council_addresses
from swarm.protocol.core.boots import next_boot
from swarm.protocol.council.timing import TIMINGS
from swarm.runtime import in_thread
from swarm.store import Store
from swarm.transport.identity import peer_id

__all__ = ["council_key", "lead", "run_in_council", "with_settings"]

_log = structlog.get_logger(__name__)
_SAY_EVERY_S: Final = 10.0
_LOOK_S: Final = 0.1
_SETTINGS: Final = ("check_share", "check_tolerance", "own_draws", "egress_copies", "coder", "node_cores")
"""Of a seed: what a machine that takes over goes on with."""

Serve = Callable[[int], Awaitable[None]]
"""`serve(boot)`: run the seed as this boot until cancelled."""


def council_key(home: Path, machines: tuple[CouncilAddress, ...]) -> Key:
    """This machine's key in the council. Raises `UsageError` when the council does not list it."""
    key = keyfile.load_or_make(home / COUNCIL_KEY)
    if key.public not in {machine.key for machine in machines}:
        raise UsageError(
            f"--council does not list this machine, whose id is {peer_id(key.public)}: put it there on every machine, "
            "in the place of the one that this machine replaces."
        )
    return key


async def run_in_council(config: SeedConfig, swarm: bytes, store: Store, book: Book, serve: Serve) -> None:
    """Found the council, or come back to it, and serve while this machine leads. `swarm`: its public key.

    Raises `UsageError` when another machine leads, and `LeadLost` when this one leads no more.
    """
    machines = council_addresses(config.council)
    key = council_key(config.home, machines)
    journal = await in_thread(Journal, config.home, book)
    if journal.is_new:
        await in_thread(journal.found, founding_records(store))
    newest, sealed = store.newest(), (await in_thread(journal.records)).get("seal")
    if newest is not None and sealed is not None and newest.manifest != sealed:
        raise UsageError(
            "This machine does not have the newest version that the council sealed: run swarm-node standby here, which "
            "fetches it from other machines."
        )
    if any(address.endswith("/tcp/0") for address in config.listen):
        raise UsageError("--listen: with --council give a port, since tickets are made before the seed leads.")
    # Standbys need a ticket, and this seed leads only once one of them is there.
    Contact(swarm, reached_at(config, config.listen), config.preset).write(config.home)
    council = CouncilService(config.home, key, machines, journal, TIMINGS[config.preset])
    async with trio.open_nursery() as nursery:
        await nursery.start(council.run)
        await _wait_for_lead(council)
        await lead(config, council, swarm, store, book, serve)
        nursery.cancel_scope.cancel()


async def _wait_for_lead(council: CouncilService) -> None:
    say_at = trio.current_time() + _SAY_EVERY_S
    while not council.is_leading:
        if leader := council.other_leader:
            raise UsageError(
                f"The machine {peer_id(leader)} of the council leads this swarm now. Run swarm-node standby here; "
                "swarm-node takeover then makes this machine lead."
            )
        if trio.current_time() >= say_at:
            say_at += _SAY_EVERY_S
            _log.info("waits_for_council")
        await trio.sleep(_LOOK_S)


async def lead(
    config: SeedConfig, council: CouncilService, swarm: bytes, store: Store, book: Book, serve: Serve
) -> None:
    """Serve until this machine leads no more, then raise `LeadLost`. The council is told that the machine has stopped,
    however this ends."""
    try:
        await in_thread(take_records, store, await in_thread(council.journal.records))
        with replicated(council, store, book, swarm):
            boot = next_boot(int(store.records.get("boot") or 0), time.time())
            settings = msgspec.json.encode({name: getattr(config, name) for name in _SETTINGS})
            records = [("boot", str(boot).encode()), ("settings", settings)]
            await in_thread(store.records.put, records)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(serve, boot)
                    nursery.start_soon(_keep_on_request, config.home, council)
                    await council.wait_lost()
                    nursery.cancel_scope.cancel()
            except* LeadLost:  # of a write that was under way
                pass
        why = await council.wait_lost()
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(1.0):
            await council.resign()
    raise LeadLost(
        f"This machine leads the swarm no more: {why}. Another machine of the council takes over; run swarm-node "
        "standby here."
    )


async def _keep_on_request(home: Path, council: CouncilService) -> None:
    """Have the council keep what `swarm-node keep` has put into the home."""
    request = home / KEEP_REQUEST
    while True:
        await trio.sleep(_LOOK_S)
        if request.exists():
            name, digest, size = msgspec.json.decode(request.read_bytes(), type=tuple[str, str, int])
            await council.keep(Kept(name, bytes.fromhex(digest), size))
            request.unlink()


def with_settings(config: SeedConfig, records: dict[str, bytes]) -> SeedConfig:
    """`config` with the settings of the seed before."""
    found: dict[str, Any] = msgspec.json.decode(records.get("settings") or b"{}")
    return replace(config, **{name: found[name] for name in _SETTINGS if name in found})
