"""The last run of a swarm whose key was replaced: a seed with the old key tells the members of the new swarm, and ends.

It listens where the seed always did, before the new swarm's seed starts there. Members reconnect by themselves, hear of
the successor, tell their neighbours, release their leases and leave. The run ends when no lease is left; a lease that
is not renewed expires.
"""

import os
import random
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import structlog
import trio

from codec.errors import UsageError
from codec.sign import Key
from node.host.announce import reached_at
from node.host.endpoint import Endpoint, NetworkOptions, open_store
from node.settings import keyfile
from node.settings.config import SeedConfig
from swarm.protocol.authority import Authority
from swarm.protocol.core.boots import next_boot
from swarm.protocol.core.notices import MemberLeft, Notice, WorkHeard
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.startup import Boot, Saved, Site
from swarm.store import Store
from swarm.store.private import FILE_MODE
from swarm.transport.identity import peer_id

__all__ = ["Handover", "hand_over"]

_log = structlog.get_logger(__name__)
_NAME: Final = "handover.json"
_AT_MOST_S: Final = 900.0
"""Limit of the run. Leases expire long before; a bug of ours must not keep the new swarm from starting."""


class Handover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in the seed's home: the members of this old swarm are still to be told."""

    swarm: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """Public key of the old swarm."""
    key: Path
    """File of its private key."""

    def write(self, home: Path) -> None:
        """Write it to `home`, atomically."""
        fresh = home / f"{_NAME}.new"
        fresh.unlink(missing_ok=True)
        with open(fresh, "xb", opener=lambda path, flags: os.open(path, flags, FILE_MODE)) as file:
            file.write(msgspec.json.encode(self, enc_hook=str))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, home / _NAME)

    @classmethod
    def read(cls, home: Path) -> "Handover | None":
        """What `rotate-key` left in `home`; None: nothing. Raises `UsageError` when it cannot be read."""
        try:
            data = (home / _NAME).read_bytes()
            return msgspec.json.decode(data, type=cls, dec_hook=lambda kind, value: kind(value))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{home / _NAME} cannot be read ({error}). Run swarm-node rotate-key again.") from error


async def hand_over(config: SeedConfig, own: bytes) -> None:
    """Tell the members of the old swarm, if `rotate-key` left one to tell. `own`: the public key that the seed will run
    with. Raises `UsageError`."""
    due = Handover.read(config.home)
    if due is None:
        return
    if due.swarm == own:
        raise UsageError("This key is being replaced: run swarm-node rotate-key again, then start the seed.")
    key = keyfile.load(due.key)
    if key.public != due.swarm:
        raise UsageError(
            f"{due.key} is not the key of {peer_id(due.swarm)}, whose members are still to be told. Put that key back."
        )
    with open_store(config.home, key.public) as store:
        newest, sealed = store.newest(), store.records.get("succession")
        if newest is not None and sealed:
            await _Last(config, key, store, newest.manifest, sealed).run()
    (config.home / _NAME).unlink()


class _Last:
    """A running handover. The runtime notifies it (`swarm.runtime.Application`)."""

    def __init__(self, config: SeedConfig, key: Key, store: Store, head: bytes, sealed: bytes) -> None:
        self._left = 0
        """Members that released their leases, so they were told."""
        self._over = trio.Event()
        start, tuning = trio.current_time(), Tuning.named(config.preset)
        wall = time.time() - start
        boot = next_boot(int(store.records.get("boot") or 0), time.time())
        store.records.put([("boot", str(boot).encode())])
        self.core = Authority(
            key, tuning, random.Random(secrets.randbits(64)),
            Boot(boot, clock=lambda local: wall + local),
            Saved(head, [record for record in store.records.all("grant/").values() if record],
                  list(store.records.all("ticket/").values()), succession=sealed),
            Site(region=config.region), now=start,
        )  # fmt: skip
        self.endpoint = Endpoint.build(
            self.core, key, key.public, store, self,
            NetworkOptions(
                config.listen, config.announce, config.via, config.up_mbit, outward=partial(reached_at, config)
            ),
            tuning=tuning,
        )  # fmt: skip

    async def run(self) -> None:
        before = len(self.core.book.leases)
        if before == 0:
            return
        _log.info("handing_over", members=before, hint="the new swarm's seed starts when they have been told")
        with trio.move_on_after(_AT_MOST_S):
            async with self.endpoint.running(leave=False):
                await self._over.wait()
        _log.info("handed_over", left=self._left, lost=before - self._left)

    # ------------------------------------------------------------ what the runtime tells us

    def committed(self, version: Any, manifest: Any, changes: Any) -> None:
        """Nothing is published in this run."""

    def notify(self, notice: Notice) -> None:
        self._left += isinstance(notice, MemberLeft)
        if not self.core.book.leases:
            self._over.set()
        if not isinstance(notice, WorkHeard):
            _log.info(notice.log_name, **notice.log_fields())
