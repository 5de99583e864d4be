"""kick and revoke while no seed runs: the commands write to its home, and refuse to while a seed runs."""

import json
import time
from pathlib import Path

import pytest

from codec.sign import Key
from node.cli.app import run
from node.host.endpoint import open_store, store_folder
from node.settings import keyfile
from node.settings.contact import Contact
from node.settings.ticket import Ticket
from swarm.protocol.core.documents import AuthorityTime, Capability, seal
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Join
from swarm.protocol.membership.enrolment import Enrolment, record_of
from swarm.protocol.membership.lease import LeaseBook
from swarm.protocol.membership.tickets import Tickets
from swarm.store import records_of
from swarm.transport.identity import peer_id

SEED, BOX, SPOT = (Key(bytes([n]) * 32) for n in (1, 2, 3))
CAPABILITY = Capability(SEED.public, b"t" * 16, time.time() + 3600, 5, 0)
TICKET = str(Ticket(SEED.public, ("/ip4/127.0.0.1/tcp/9",), seal(CAPABILITY, SEED), "wan"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stopped seed's home, with two members that joined with one ticket."""
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    keyfile.write(tmp_path / keyfile.AUTHORITY_KEY, SEED)
    Contact(SEED.public, ("/ip4/127.0.0.1/tcp/9",), "wan").write(tmp_path)
    book = LeaseBook(SEED.public, SEED, Tuning.named("wan"))
    with open_store(tmp_path, SEED.public) as store:
        for key, name in ((BOX, "box"), (SPOT, "spot")):
            lease = book.admit(CAPABILITY, key.public, AuthorityTime(time.time()))
            assert not isinstance(lease, tuple)
            join = Join(seal(CAPABILITY, SEED), (), name, "", 100.0, 100.0, False)
            store.records.put([(f"grant/{lease.grant.slot}", record_of(lease.sealed, Enrolment(join, None)))])
        store.records.put([(f"ticket/{CAPABILITY.id.hex()}", book.tickets.record(CAPABILITY.id))])
    return tmp_path


def output_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run(words) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if code == 0 else captured.err


def slots(home: Path) -> list[int]:
    with records_of(store_folder(home, SEED.public)) as records:
        return [int(name.split("/")[1]) for name, record in records.all("grant/").items() if record]


def restarted(home: Path) -> Tickets:
    """The tickets as the next start of the seed reads them."""
    tickets = Tickets()
    with records_of(store_folder(home, SEED.public)) as records:
        bars = [r for kind in ("bar/", "kick/") for r in records.all(kind).values() if r]
        tickets.restore(records.all("ticket/").values(), bars)
    return tickets


def refused(home: Path, key: Key, in_s: float = 0.0) -> bool:
    return restarted(home).refusal(CAPABILITY, key.public, AuthorityTime(time.time() + in_s)) is not None


def test_revoke_alone_lists(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ticket,) = json.loads(output_of(capsys, "revoke", "--json"))["tickets"]
    assert (ticket["here"], ticket["ever"], ticket["nodes"]) == (2, 2, 5)
    assert set(ticket["peers"]) == {peer_id(BOX.public), peer_id(SPOT.public)}
    assert "2 of 5 now, 2 ever" in output_of(capsys, "revoke")


def test_a_kick_ends_a_lease_and_lasts_ten_minutes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output_of(capsys, "kick", "box", "--json")) == {"changed": True, "put_out": [peer_id(BOX.public)]}
    assert slots(home) == [1]
    assert refused(home, BOX)
    assert not refused(home, BOX, in_s=601)
    assert not refused(home, SPOT)
    assert "No node 'box'" in output_of(capsys, "kick", "box", code=2)


def test_a_machine_is_revoked_by_name_and_the_revocation_undone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_of(capsys, "kick", "box")
    assert "spot is revoked" in output_of(capsys, "revoke", "spot")
    assert slots(home) == []
    assert refused(home, SPOT, in_s=3000)
    for key in (SPOT, BOX):  # undo takes a kick back, too
        output_of(capsys, "revoke", peer_id(key.public), "--undo")
        assert not refused(home, key)


def test_a_revoked_ticket_ends_its_leases(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    revoked = json.loads(output_of(capsys, "revoke", TICKET, "--json"))
    assert revoked["changed"]
    assert len(revoked["put_out"]) == 2
    assert slots(home) == []
    assert refused(home, BOX)
    assert json.loads(output_of(capsys, "revoke", TICKET, "--json")) == {"changed": False, "put_out": []}
    output_of(capsys, "revoke", CAPABILITY.id.hex(), "--undo")
    assert not refused(home, BOX)


def test_it_is_refused_while_a_process_uses_the_home(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(home, SEED.public):
        for words in (("revoke",), ("kick", "box"), ("revoke", "box")):
            assert "Another process uses" in output_of(capsys, *words, code=2)
    assert slots(home) == [0, 1]


def test_a_home_in_which_no_seed_has_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No seed serves" in output_of(capsys, "revoke", "--home", str(tmp_path), code=3)
    Contact(SEED.public, ("/ip4/127.0.0.1/tcp/9",), "wan").write(tmp_path)
    assert "holds nothing of this seed's swarm" in output_of(capsys, "revoke", "--home", str(tmp_path), code=2)
