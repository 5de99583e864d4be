"""The files that a council keeps, on one machine."""

from pathlib import Path

import pytest

from codec.errors import PeerError, UsageError
from node.council.kept import Kept, KeptFiles, check_name, established, kept_in


def test_a_file_is_copied_in_and_out_verified(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"state")
    files = KeptFiles(tmp_path)
    kept = files.add(tmp_path / "state", "optimizer")
    assert files.has(kept)
    assert kept_in(dict([kept.record(), ("boot", b"1")])) == [kept]
    files.copy_out(kept, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"state"
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="Cannot write"):
        files.copy_out(kept, tmp_path / "out")
    files.path(kept).write_bytes(b"State")
    with pytest.raises(UsageError, match="damaged"):
        files.copy_out(kept, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_comes_with_other_bytes_is_refused(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path / "one")
    (tmp_path / "state").write_bytes(b"state")
    kept = files.add(tmp_path / "state", "optimizer")
    other = KeptFiles(tmp_path / "two")
    (tmp_path / "coming").write_bytes(b"State")
    with pytest.raises(PeerError, match="other bytes"):
        other.take(kept, tmp_path / "coming")
    assert not other.has(kept)
    (tmp_path / "coming").write_bytes(b"state")
    other.take(kept, tmp_path / "coming")
    assert other.has(kept)


@pytest.mark.parametrize("name", ["", ".", "..", "../key", "a/b", ".hidden", "a" * 65, "a b", "ä"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(PeerError):
        check_name(name)
    with pytest.raises(PeerError):
        KeptFiles(Path("/nowhere")).path(Kept(name, bytes(32), 1))


def test_without_a_council_nothing_is_kept(tmp_path: Path) -> None:
    assert established(tmp_path) == []
