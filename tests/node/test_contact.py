"""What the seed leaves for invite."""

from pathlib import Path

import pytest

from codec.errors import UsageError
from node.contact import Contact

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
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "contact.json").write_text(content)
    with pytest.raises(UsageError, match="cannot be read"):
        Contact.read(tmp_path)
