"""rotate-key on a home: the new swarm has the old one's bits, and an interruption at any step can be repaired."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec import Checkpoint, Layout, Replica, TensorSpec, open_manifest, write_checkpoint
from codec.errors import UsageError
from codec.sign import Key
from node.cli.app import run
from node.coordinator import rotation
from node.coordinator.handover import Handover
from node.coordinator.rotation import rotate
from node.host.endpoint import open_store, store_folder
from node.member.following import follow, note, ticket_of
from node.settings import keyfile
from node.settings.contact import Contact
from node.settings.ticket import Ticket
from swarm.protocol.core.documents import AuthorityTime, Capability, open_capability, seal
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Join
from swarm.protocol.membership.enrolment import Enrolment, record_of
from swarm.protocol.membership.lease import LeaseBook
from swarm.protocol.membership.tickets import Tickets
from swarm.runtime.publishing import genesis
from swarm.runtime.replica.model import Model
from swarm.store import records_of

OLD, BOX, SPOT, BAD, THIEF = (Key(bytes([n]) * 32) for n in range(1, 6))
CAPABILITY = Capability(OLD.public, b"t" * 16, time.time() + 3600, 5, 0)
LEAKED = Capability(OLD.public, b"l" * 16, time.time() + 3600, 5, 0)
ADDRS = ("/ip4/127.0.0.1/tcp/9",)
LAYOUT = Layout((TensorSpec("w", "BF16", (5000,)),))
WORDS = np.arange(5000, dtype=np.uint16)
DAY = 86_400.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A seed's home at version 0: one member, one that left, one that was barred, one with a revoked ticket."""
    home = tmp_path / "home"
    keyfile.write(home / keyfile.AUTHORITY_KEY, OLD)
    Contact(OLD.public, ADDRS, "wan").write(home)
    write_checkpoint(tmp_path / "base", LAYOUT, lambda name: WORDS, {})
    base = Checkpoint.open(tmp_path / "base")
    book = LeaseBook(OLD.public, OLD, Tuning.named("wan"))
    with open_store(home, OLD.public) as store:
        genesis(store, Model(store), Replica.from_checkpoint(base, base.layout), OLD, files=base.files)
        for key, ticket in ((BOX, CAPABILITY), (SPOT, CAPABILITY), (BAD, CAPABILITY), (THIEF, LEAKED)):
            lease = book.admit(ticket, key.public, AuthorityTime(time.time()))
            assert not isinstance(lease, tuple)
            if key is BOX:
                join = Join(seal(CAPABILITY, OLD), (), "box", "", 100.0, 100.0, False)
                store.records.put([(f"grant/{lease.grant.slot}", record_of(lease.sealed, Enrolment(join, None)))])
        book.tickets.revoke(LEAKED.id)
        book.tickets.bar(BAD.public)
        store.records.put([
            *((f"ticket/{each.id.hex()}", book.tickets.record(each.id)) for each in (CAPABILITY, LEAKED)),
            (f"bar/{BAD.public.hex()}", book.tickets.bar_record(BAD.public)),
        ])  # fmt: skip
    return home


def check_rotated(home: Path) -> None:
    """Assert that the home is that of the complete new swarm, and that a handover of the old one is due."""
    new = keyfile.load(home / keyfile.AUTHORITY_KEY)
    assert new.public != OLD.public
    assert not (home / "authority.key.next").exists()
    due = Handover.read(home)
    assert due is not None
    assert (due.swarm, keyfile.load(due.key).public) == (OLD.public, OLD.public)
    assert Contact.read(home) == Contact(new.public, ADDRS, "wan")
    with records_of(store_folder(home, OLD.public)) as records:
        sealed = records.get("succession")
    assert sealed
    ticket = ticket_of(sealed, OLD.public)
    assert (ticket.authority, ticket.addrs, ticket.preset) == (new.public, ADDRS, "wan")
    capability = open_capability(ticket.capability, new.public)
    with open_store(home, new.public) as store:
        model = Model(store)
        found = model.restore()
        assert found is not None
        assert found.id == (1, 0)
        assert open_manifest(found.manifest, new.public).root == found.root
        assert np.array_equal(model.read(lambda replica: replica.bits("w")[:]), WORDS)
        tickets = Tickets()
        bars = [r for r in store.records.all("bar/").values() if r]
        tickets.restore([r for name, r in store.records.all("ticket/").items() if capability.id.hex() in name], bars)
    now = AuthorityTime(time.time())
    refused = [key for key in (BOX, SPOT, BAD, THIEF) if tickets.refusal(capability, key.public, now) is not None]
    assert refused == [BAD, THIEF]


def test_the_new_swarm_begins_with_the_old_ones_bits_and_knows_its_members(home: Path) -> None:
    done = rotate(home, None, None, 30 * DAY)
    assert (done.old, done.peers, done.version) == (OLD.public, 2, (1, 0))
    check_rotated(home)


STEPS = [
    (keyfile, "load_or_make"), (rotation, "genesis"), (rotation, "_sign_over"), (rotation, "_retired"),
    (Handover, "write"), (rotation, "_activate_key"), (Contact, "write"),
]  # fmt: skip


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("target", "name"), STEPS, ids=[name for _, name in STEPS])
def test_an_interrupted_rotation_is_finished_by_running_it_again(
    home: Path, target: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(target, name)

    def call(*arguments: Any, **named: Any) -> None:
        if after:
            real(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, name, call)
        with pytest.raises(KeyboardInterrupt):
            rotate(home, None, None, 30 * DAY)
    assert (home / keyfile.AUTHORITY_KEY).exists(), "without its key, a seed would create another swarm"
    if Contact.read(home).authority == OLD.public:
        rotate(home, None, None, 30 * DAY)
    else:
        assert (name, after) == ("write", True), "nothing is left to do"
    check_rotated(home)


def test_it_is_refused_while_a_seed_runs_and_for_a_key_that_was_replaced(home: Path, tmp_path: Path) -> None:
    with open_store(home, OLD.public), pytest.raises(UsageError, match="Another process uses"):
        rotate(home, None, None, DAY)
    rotate(home, None, None, DAY)
    copy = tmp_path / "old.key"
    os.link(home / f"retired-{OLD.public.hex()[:16]}.key", copy)
    with pytest.raises(UsageError, match="has another key"):
        rotate(home, copy, tmp_path / "new.key", DAY)


def test_a_key_outside_the_home(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.rename(home / keyfile.AUTHORITY_KEY, tmp_path / "old.key")
    words = ["rotate-key", "--home", str(home), "--key", str(tmp_path / "old.key")]
    assert run(words) == 2
    assert "go together" in capsys.readouterr().err
    assert run([*words, "--out", str(tmp_path / "new.key"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert keyfile.load(Path(output["file"])).public.hex() == output["public_key"]
    assert keyfile.load(Path(output["old_file"])).public == OLD.public


def test_a_home_without_a_usable_version_is_an_error(home: Path, tmp_path: Path) -> None:
    for path in (home / f"swarm-{OLD.public.hex()[:16]}" / "anchors").glob("*/*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged"):
        rotate(home, None, None, DAY)
    empty = tmp_path / "empty"
    keyfile.write(empty / keyfile.AUTHORITY_KEY, OLD)
    with pytest.raises(UsageError, match="No seed has run"):
        rotate(empty, None, None, DAY)


# ---------------------------------------------------------------- where a member's ticket leads


def test_a_ticket_leads_to_the_recorded_successor_and_old_bits_stay_until_there_are_new_ones(home: Path) -> None:
    ticket = Ticket(OLD.public, ADDRS, seal(CAPABILITY, OLD), "wan")
    assert (follow(home, ticket).ticket, follow(home, ticket).followed) == (ticket, False)
    member = home.parent / "member"
    base = Checkpoint.open(home.parent / "base")
    rotate(home, None, None, DAY)
    with records_of(store_folder(home, OLD.public)) as records:
        sealed = records.get("succession")
    assert sealed
    with open_store(member, OLD.public) as store:
        genesis(store, Model(store), Replica.from_checkpoint(base, base.layout), OLD, files=base.files)
        note(store, sealed)
        note(store, b"another")  # the first successor counts
    way = follow(member, ticket)
    assert (way.followed, way.ticket) == (True, ticket_of(sealed, OLD.public))
    assert way.base is not None
    assert Checkpoint.open(way.base).layout.hash == base.layout.hash
    new = keyfile.load(home / keyfile.AUTHORITY_KEY)
    with open_store(member, new.public) as store:
        genesis(store, Model(store), Replica.from_checkpoint(base, base.layout), new, files=base.files)
    way = follow(member, ticket)
    assert (way.ticket.authority, way.base) == (new.public, None)
    kept = sorted(path.name for path in store_folder(member, OLD.public).iterdir())
    assert kept == ["lock", "swarm.sqlite"], "only the records that lead from the old ticket"
