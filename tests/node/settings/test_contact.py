"""The contact file, which `seed` writes and `invite` reads."""

from pathlib import Path

import pytest

from codec.errors import UsageError
from node.settings.addresses import address
from node.settings.contact import Contact, dialable, only_near

CONTACT = Contact(bytes(32), ("/ip4/203.0.113.7/tcp/4001",), "lan")


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    Contact(bytes(32), ("/ip4/203.0.113.8/tcp/1",), "wan").write(tmp_path)
    CONTACT.write(tmp_path)
    assert Contact.read(tmp_path) == CONTACT
    assert [path.name for path in tmp_path.iterdir()] == ["contact.json"]


def test_no_seed_yet(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="swarm-node seed"):
        Contact.read(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"authority": "AA", "addrs": [], "preset": "wan"}'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "contact.json").write_text(content)
    with pytest.raises(UsageError, match="cannot be read"):
        Contact.read(tmp_path)


def test_a_wildcard_becomes_addresses_that_can_be_dialed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.settings.contact._own_address", lambda kind: "10.0.0.7" if kind == "ip4" else None)
    assert dialable(["/ip4/0.0.0.0/tcp/4001"]) == ("/ip4/10.0.0.7/tcp/4001", "/ip4/127.0.0.1/tcp/4001")
    assert dialable(["/ip6/::/tcp/4001"]) == ("/ip6/::1/tcp/4001",)
    assert dialable(["/dns/box.example/tcp/1", "/dns/box.example/tcp/1"]) == ("/dns/box.example/tcp/1",)
    assert len(dialable([f"/ip4/0.0.0.0/tcp/{port}" for port in range(1, 9)])) == 4


def test_own_address_is_one_or_none() -> None:
    for text in dialable(["/ip4/0.0.0.0/tcp/4001"]):
        assert address(text) == text
        assert "0.0.0.0" not in text


@pytest.mark.parametrize(
    ("addrs", "near"),
    [
        (["/ip4/127.0.0.1/tcp/1"], True),
        (["/ip4/192.168.1.2/tcp/1", "/ip6/::1/tcp/1"], True),
        (["/ip4/192.168.1.2/tcp/1", "/ip4/8.8.8.8/tcp/1"], False),
        (["/dns/box.example/tcp/1"], False),
    ],
)
def test_which_addresses_are_local_only(addrs: list[str], near: bool) -> None:
    assert only_near(addrs) == near
