"""Replaces a swarm's key while its seed does not run: a new swarm with the same bits, to which the old key signs over.

Each step is durable and can be repeated, so a rotation that was interrupted is finished by running it again:

1. Make the new key beside the old one: `authority.key.next`.
2. Make a new store. Its version 0 has the bits of the old swarm's newest, in the next epoch, so versions go on rising.
3. Write to the new store a ticket for exactly the peers that the old swarm knew, and the barred peers.
4. Write to the old store the succession, signed by the old key.
5. Write `handover.json`: the seed's next start first tells the members of the old swarm (`node.coordinator.handover`).
6. Move the new key to the old one's place, and name it in `contact.json`, so that `invite` makes tickets of the new
   swarm.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from codec import Replica, open_manifest
from codec.errors import UsageError
from codec.sign import Key
from node.coordinator.handover import Handover
from node.coordinator.recovery import CHECKPOINTS_KEPT
from node.host.endpoint import open_store
from node.settings import keyfile
from node.settings.contact import Contact
from swarm.protocol.core.documents import Capability, open_grant, seal
from swarm.protocol.membership.enrolment import open_record
from swarm.protocol.membership.succession import Successor, open_successor, seal_successor
from swarm.protocol.membership.tickets import Tickets
from swarm.runtime.publishing import genesis
from swarm.runtime.replica.model import Model
from swarm.store import Seal, Store

__all__ = ["Rotated", "rotate"]

_NEXT: Final = ".next"
_RECORD: Final = "succession"


@dataclass(frozen=True, slots=True)
class Rotated:
    """The result of a rotation."""

    old: bytes
    new: bytes
    """Public keys."""
    old_key: Path
    new_key: Path
    ticket: bytes
    """Id of the ticket by which the old swarm's members come in."""
    peers: int
    """For how many members the ticket is."""
    version: tuple[int, int]
    """(epoch, version) of the new swarm's first version, which has the bits of the old one's newest."""


def rotate(home: Path, key: Path | None, out: Path | None, expires_s: float) -> Rotated:
    """Replace the key of the swarm of `home`.

    `key`, `out`: files of the old and the new key, if they are not in `home`. `expires_s`: for how long members of the
    old swarm can follow. Raises `UsageError` when the seed runs or something is missing.
    """
    if (key is None) != (out is None):
        raise UsageError(
            "--key and --out go together: give the file of the old key and that of the new one, or neither."
        )
    old_path = key or home / keyfile.AUTHORITY_KEY
    new_path = out or home / keyfile.AUTHORITY_KEY
    contact, begun = Contact.read(home), Handover.read(home)
    if key is None and begun is not None and begun.swarm == contact.authority and begun.key.exists():
        old_path = begun.key  # an earlier run came as far as step 5, so step 6 may be done
    old = keyfile.load(old_path)
    if contact.authority != old.public:
        raise UsageError(f"The seed of {home} has another key than {old_path}: give its file with --key and --out.")
    next_path = out or new_path.with_name(new_path.name + _NEXT)
    if begun is not None and old_path == begun.key and not next_path.exists():
        next_path = new_path
    new = keyfile.load_or_make(next_path)
    with open_store(home, old.public) as before:
        with open_store(home, new.public, checkpoints_kept=CHECKPOINTS_KEPT) as after:
            version = _first_version(before, after, old, new)
            ticket, peers = _sign_over(before, after, old, new, contact, expires_s)
        retired = old_path if key is not None else _retired(old_path, old)
        Handover(old.public, retired).write(home)
    _activate_key(next_path, new_path)
    Contact(new.public, contact.addrs, contact.preset).write(home)
    return Rotated(old.public, new.public, retired, new_path, ticket, peers, version)


def _first_version(before: Store, after: Store, old: Key, new: Key) -> tuple[int, int]:
    """Make the new swarm's first version, unless an earlier run did; its (epoch, version)."""
    begun = after.newest()
    if begun is not None:
        return begun.id
    newest = before.newest()
    if newest is None:
        raise UsageError(
            f"{before.folder} holds no version yet, so there is nothing to carry over. Make a new swarm instead."
        )
    replica = _bits(before, newest)
    if open_manifest(newest.manifest, old.public).root != replica.root:
        raise UsageError(f"{before.folder} does not hold the bits of version {newest.id}. Start the seed and stop it.")
    files = {spec.name: before.file(spec.hash) for spec in replica.layout.files}
    lacking = sorted(name for name, data in files.items() if data is None)
    if lacking:
        raise UsageError(f"{before.folder} lacks {', '.join(lacking)}. Start the seed, which repairs it, and stop it.")
    found = {name: data for name, data in files.items() if data is not None}
    return genesis(after, Model(after), replica, new, files=found, epoch=newest.id.epoch + 1).id


def _bits(store: Store, newest: Seal) -> Replica:
    model = Model(store)
    found = model.restore()
    if found is None or found.id < newest.id or not isinstance(model.replica, Replica):
        raise UsageError(
            f"What {store.folder} holds of version {newest.id}, the newest, is damaged. Start the seed, which repairs "
            "it or says what is lost, and stop it."
        )
    while model.audit():
        pass
    return model.replica


def _sign_over(
    before: Store, after: Store, old: Key, new: Key, contact: Contact, expires_s: float
) -> tuple[bytes, int]:
    """Sign the succession, and the ticket in it: the ticket's id, and for how many peers it is."""
    sealed = before.records.get(_RECORD)
    if sealed and (kept := open_successor(sealed, old.public)).successor == new.public:
        capability = msgspec.msgpack.decode(kept.capability[64:], type=Capability)  # signed by an earlier run
        return capability.id, capability.nodes
    if sealed:
        raise UsageError("This key was replaced before. A swarm has one successor: rotate the key of that one.")
    peers, barred = _known(before, old.public)
    capability = Capability(
        new.public, os.urandom(16), time.time() + expires_s, len(peers), 0, max(1, len(peers))
    )  # fmt: skip
    tickets = Tickets()
    tickets.reserve(capability, peers)
    for peer in barred:
        tickets.bar(peer)
    after.records.put([
        (f"ticket/{capability.id.hex()}", tickets.record(capability.id)),
        *((f"bar/{peer.hex()}", tickets.bar_record(peer)) for peer in barred),
    ])  # fmt: skip
    document = Successor(old.public, new.public, contact.addrs, seal(capability, new), contact.preset)
    before.records.put([(_RECORD, seal_successor(document, old))])
    return capability.id, len(peers)


def _known(store: Store, swarm: bytes) -> tuple[set[bytes], list[bytes]]:
    """The peers that may follow (those with a lease or a ticket that is not revoked), and the barred ones."""
    tickets = Tickets()
    tickets.restore(store.records.all("ticket/").values(), [r for r in store.records.all("bar/").values() if r])
    peers = {peer for ticket in tickets if not ticket.revoked for peer in ticket.peers}
    for record in store.records.all("grant/").values():
        if record:
            peers.add(open_grant(open_record(record)[0], swarm).peer)
    return peers - set(tickets.barred), tickets.barred


def _retired(path: Path, old: Key) -> Path:
    """A second name for the old key's file: the handover runs with that key once more."""
    retired = path.with_name(f"retired-{old.public.hex()[:16]}.key")
    if path != retired and not retired.exists():
        os.link(path, retired)
    return retired


def _activate_key(next_path: Path, new_path: Path) -> None:
    """Move the new key into place. Atomic: a seed that found no key would make one, and with it another swarm."""
    os.replace(next_path, new_path)
