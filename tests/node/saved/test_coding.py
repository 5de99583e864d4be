"""A saved state: its record, its encryption, its fragments on disk, and back."""

import os
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_kit import KEY, OTHER, coded

from codec.errors import PeerError, UsageError
from codec.sign import Key
from node.saved.cipher import RowCipher
from node.saved.coding import RECORD, CodedState, code_file, join_file, needed_of
from node.saved.record import MAX_SEGMENTS, SHARE_BYTES, StateRecord, open_record, segment_rows_for


def joined(state: CodedState, fragments: tuple[int, ...], out: Path, key: Key = KEY) -> bytes:
    join_file({number: state.path(number) for number in fragments}, state.record, key, out)
    return out.read_bytes()


@pytest.mark.parametrize("size", [1, 2 * SHARE_BYTES - 17, 2 * SHARE_BYTES - 16, 2 * SHARE_BYTES - 15, 1_000_003])
def test_any_half_of_the_fragments_gives_the_content_back(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    state = coded(tmp_path, content)
    for chosen in combinations(range(4), 2):
        assert joined(state, chosen, tmp_path / f"out{chosen}") == content
    assert state.record.size == size
    assert {state.path(number).stat().st_size for number in range(4)} == {state.record.fragment_bytes}
    assert CodedState.open(state.folder, KEY.public) == state


@given(total=st.integers(1, 24), size=st.integers(0, 3_000_000))
@settings(max_examples=15)
def test_the_sizes_of_a_record_add_up(total: int, size: int) -> None:
    needed = needed_of(total)
    record = StateRecord(KEY.public, 1, 2, size, bytes(32), needed, total, segment_rows_for(size, needed), b"")
    assert sum(record.content_of(row) for row in range(record.rows)) == size
    assert sum(record.share_of(row) for row in range(record.rows)) == record.fragment_bytes
    assert sum(record.bytes_of_segment(segment) for segment in range(record.segments)) == record.fragment_bytes
    assert all(record.bytes_of_segment(segment) > 0 for segment in range(record.segments))


@pytest.mark.parametrize("size", [1, 10**9, 10**12, 1 << 42])
@pytest.mark.parametrize("total", [1, 12, 24])
def test_a_record_of_any_state_is_small(size: int, total: int) -> None:
    rows = segment_rows_for(size, needed_of(total))
    record = StateRecord(KEY.public, 1, 2, size, bytes(32), needed_of(total), total, rows, b"")
    assert 1 <= record.segments <= MAX_SEGMENTS


def test_what_lies_on_the_nodes_does_not_show_the_content(tmp_path: Path) -> None:
    state = coded(tmp_path, b"a secret " * 100_000)
    assert not any(b"secret" in path.read_bytes() for path in state.folder.iterdir())
    again = coded(tmp_path, b"a secret " * 100_000, serial=2)
    assert again.path(0).read_bytes()[:64] != state.path(0).read_bytes()[:64], "each state has a key of its own"


def test_another_key_opens_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    state = coded(tmp_path, b"content")
    with pytest.raises(PeerError, match="does not open with this key"):
        joined(state, (0, 1), tmp_path / "out", OTHER)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["coded1", "source"]


def test_swapped_and_cut_off_rows_do_not_open() -> None:
    record = StateRecord(KEY.public, 1, 2, 500_000, bytes(32), 1, 1, 64, b"")
    cipher = RowCipher(KEY, record)
    assert record.rows == 4
    first, last = cipher.seal_row(0, b"first"), cipher.seal_row(3, b"last")
    assert (cipher.open_row(0, first), cipher.open_row(3, last)) == (b"first", b"last")
    for row, sealed in ((1, first), (3, first), (0, last), (0, first[:-1]), (0, b"")):
        with pytest.raises(PeerError, match="does not open"):
            cipher.open_row(row, sealed)
    shorter = msgspec.structs.replace(record, size=record.row_bytes)
    assert shorter.rows == 1
    with pytest.raises(PeerError, match="does not open"):
        RowCipher(KEY, shorter).open_row(0, first)


@pytest.mark.parametrize("changed", ["serial", "step", "size", "needed", "total", "salt"])
def test_an_altered_record_opens_nothing(changed: str) -> None:
    record = StateRecord(KEY.public, 1, 2, 5, bytes(32), 2, 4, 64, b"")
    other = b"x" * 32 if changed == "salt" else getattr(record, changed) + 1
    sealed = RowCipher(KEY, record).seal_row(0, b"hello")
    with pytest.raises(PeerError, match="does not open"):
        RowCipher(KEY, msgspec.structs.replace(record, **{changed: other})).open_row(0, sealed)


def test_a_record_is_refused_unless_it_is_whole_and_signed(tmp_path: Path) -> None:
    state = coded(tmp_path, b"content")
    record, sealed = state.record, state.sealed
    assert open_record(sealed, KEY.public) == record
    for bad, why in (
        (sealed[:-1], "signature"),
        (b"", "bytes"),
        (bytes(1 << 20), "bytes"),
        (record.sign(KEY)[:64] + OTHER.seal(b"x", b"y")[64:], "signature"),
    ):
        with pytest.raises(PeerError, match=why):
            open_record(bad, KEY.public)
    with pytest.raises(PeerError, match="signature"):
        open_record(sealed, OTHER.public)
    for altered in ({"digests": record.digests[:-32]}, {"needed": 5}, {"size": 10**12}):
        with pytest.raises(PeerError, match="saved state"):
            open_record(msgspec.structs.replace(record, **altered).sign(KEY), KEY.public)


def test_a_file_that_changes_while_it_is_read_is_not_saved(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1_000_000))

    def cut_off(done: int, size: int) -> None:
        os.truncate(source, 300_000)

    with pytest.raises(UsageError, match="written to while it was read"):
        code_file(source, tmp_path / "coded", KEY, serial=1, step=0, total=2, progress=cut_off)
    assert not (tmp_path / "coded" / RECORD).exists()
    with pytest.raises(UsageError, match="Cannot read"):
        code_file(tmp_path / "none", tmp_path / "other", KEY, serial=1, step=0, total=2)


def test_a_file_that_is_rewritten_while_it_is_read_is_not_saved(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1_000_000))

    def rewrite(done: int, size: int) -> None:
        source.write_bytes(b"x" * 1_000_000)
        os.utime(source, (1, 1))

    with pytest.raises(UsageError, match="written to while it was read"):
        code_file(source, tmp_path / "coded", KEY, serial=1, step=0, total=2, progress=rewrite)
    assert not (tmp_path / "coded" / RECORD).exists()


def test_only_a_file_with_content_is_saved(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"")
    for source, why in (("pipe", "no regular file"), ("/dev/null", "no regular file"), ("empty", "is empty")):
        with pytest.raises(UsageError, match=why):
            code_file(tmp_path / source, tmp_path / "coded", KEY, serial=1, step=0, total=2)
    assert not (tmp_path / "coded").exists()


def test_a_disk_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10**7, free=10**6))
    with pytest.raises(UsageError, match=r"need 0\.0 GB, and the disk .* larger disk"):
        coded(tmp_path, bytes(400_000))
    coded(tmp_path, bytes(100_000), serial=2)


def test_an_output_that_exists_stays(tmp_path: Path) -> None:
    state = coded(tmp_path, b"content")
    (tmp_path / "out").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already"):
        joined(state, (0, 1), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"mine"
