"""The fragments on a node's disk: what is taken, what is refused, and what survives a restart."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from saved_kit import BUDGET, KEY, OTHER, coded

from codec.errors import PeerError
from node.saved.coding import CodedState
from node.saved.folder import KEEP_S, FragmentFolder, NoRoom
from swarm.store.disk import Disk


def folder_at(path: Path, budget: int = BUDGET, now: float = 0.0) -> FragmentFolder:
    return FragmentFolder(path / "held", KEY.public, budget, clock=lambda: now or os.stat(path).st_mtime)


def take(folder: FragmentFolder, state: CodedState, fragment: int, *, whole: int = 0, most: int = 1 << 40) -> bool:
    """Give the folder a fragment, or its first `most` bytes; whether it is whole then."""
    coming = folder.begin(state.sealed, fragment, whole)
    if coming is None:
        return True
    try:
        coming.resume()
        with open(state.path(fragment), "rb") as file:
            file.seek(coming.segment * state.record.segment_bytes)
            while (part := file.read(min(100_000, most))) and most > 0:
                coming.write(part)
                most -= len(part)
        if coming.segment < state.record.segments:
            return False
        coming.finish()
        return True
    finally:
        coming.close()


def held(folder: FragmentFolder) -> dict[bytes, tuple[int, ...]]:
    return {state.record: state.fragments for state in folder.held() if state.fragments}


def test_a_fragment_is_held_and_given_back_after_a_restart(tmp_path: Path) -> None:
    state = coded(tmp_path, os.urandom(500_000))
    folder = folder_at(tmp_path)
    assert take(folder, state, 2)
    assert take(folder, state, 2), "it is here already"
    for each in (folder, folder_at(tmp_path)):
        assert held(each) == {state.sealed: (2,)}
        found = each.open_segment(1, 2, 0)
        assert found is not None
        with found[0] as file:
            assert file.read(found[1]) == state.path(2).read_bytes()
        assert each.open_segment(1, 2, 1) is None
        assert each.open_segment(1, 3, 0) is None
        assert each.open_segment(9, 2, 0) is None


def test_an_interrupted_fragment_goes_on_after_its_last_whole_segment(tmp_path: Path) -> None:
    state = coded(tmp_path, os.urandom(30_000_000), total=1)
    assert state.record.segments == 4
    assert not take(folder_at(tmp_path), state, 0, most=20_000_000)
    folder = folder_at(tmp_path)
    coming = folder.begin(state.sealed, 0, 0)
    assert coming is not None
    coming.resume()
    assert coming.segment == 2
    coming.close()
    assert held(folder) == {}
    assert take(folder, state, 0)
    assert (tmp_path / "held" / f"{1:016x}" / "0.fragment").read_bytes() == state.path(0).read_bytes()


def test_a_wrong_segment_is_refused_and_cut_off(tmp_path: Path) -> None:
    state = coded(tmp_path, os.urandom(30_000_000), total=1)
    data = bytearray(state.path(0).read_bytes())
    data[10_000_000] ^= 1
    state.path(0).write_bytes(data)
    folder = folder_at(tmp_path)
    with pytest.raises(PeerError, match="segment 1 has another digest"):
        take(folder, state, 0)
    assert (tmp_path / "held" / f"{1:016x}" / "0.fragment.tmp").stat().st_size == state.record.segment_bytes


def test_only_the_swarms_key_may_place_a_fragment(tmp_path: Path) -> None:
    foreign = coded(tmp_path, b"content", key=OTHER)
    folder = folder_at(tmp_path)
    with pytest.raises(PeerError, match="signature"):
        folder.begin(foreign.sealed, 0, 0)
    state = coded(tmp_path, b"content", serial=2)
    with pytest.raises(PeerError, match="not a fragment 4"):
        folder.begin(state.sealed, 4, 0)
    assert list((tmp_path / "held").glob("*")) == []


def test_an_older_state_is_refused_once_a_newer_one_is_settled(tmp_path: Path) -> None:
    old, new = coded(tmp_path, b"old"), coded(tmp_path, b"new", serial=2)
    folder = folder_at(tmp_path)
    take(folder, old, 0)
    take(folder, new, 0, whole=1)
    assert held(folder) == {old.sealed: (0,), new.sealed: (0,)}, "both stay until the newer one is whole"
    folder.settle(2)
    assert held(folder) == {new.sealed: (0,)}
    with pytest.raises(PeerError, match="older than 2, which is settled"):
        folder.begin(old.sealed, 0, 0)
    with pytest.raises(PeerError, match="older than 2"):
        folder_at(tmp_path).begin(old.sealed, 0, 0)
    (tmp_path / "again").mkdir()
    with pytest.raises(PeerError, match="another one with the serial 2"):
        folder.begin(coded(tmp_path / "again", b"other", serial=2).sealed, 0, 0)


def test_a_state_that_was_cut_off_goes_and_the_last_whole_one_stays(tmp_path: Path) -> None:
    states = [coded(tmp_path, b"%d" % serial, serial=serial) for serial in (1, 2, 3)]
    folder = folder_at(tmp_path)
    take(folder, states[0], 0)
    take(folder, states[1], 0, whole=1)
    take(folder, states[2], 0, whole=1)
    assert set(held(folder)) == {states[0].sealed, states[2].sealed}


def test_a_seed_that_knows_of_no_whole_state_has_none_dropped_that_may_be_whole(tmp_path: Path) -> None:
    states = [coded(tmp_path, b"%d" % serial, serial=serial) for serial in range(1, 6)]
    folder = folder_at(tmp_path)
    take(folder, states[0], 0)
    take(folder, states[1], 0, whole=1)
    take(folder, states[2], 0)
    assert set(held(folder)) == {state.sealed for state in states[:3]}, "1 may be whole, and 2, too"
    take(folder, states[3], 0)
    assert set(held(folder)) == {state.sealed for state in states[1:4]}, "no more than three"
    folder.settle(3)
    take(folder, states[3], 0)
    take(folder, states[4], 0)
    assert set(held(folder)) == {state.sealed for state in states[2:5]}


def test_a_newer_state_stays_while_the_last_whole_one_is_placed_again(tmp_path: Path) -> None:
    whole, newer = coded(tmp_path, b"whole"), coded(tmp_path, b"newer", serial=2)
    folder = folder_at(tmp_path)
    take(folder, newer, 0, whole=1)
    take(folder, whole, 0, whole=1)
    assert set(held(folder)) == {whole.sealed, newer.sealed}


def test_what_was_promised_counts_where_the_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = coded(tmp_path, os.urandom(500_000), total=4)
    size = state.record.fragment_bytes
    free = 2 * size + 1000
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1000, free=free))
    folder = folder_at(tmp_path)
    assert not take(folder, state, 0, most=100_000)
    free -= 100_000
    assert not take(folder, state, 1, most=100_000)
    free -= 100_000
    with pytest.raises(NoRoom, match="nearly full"):
        take(folder, state, 2)
    assert take(folder, state, 1)


def test_no_more_is_taken_than_the_budget(tmp_path: Path) -> None:
    state = coded(tmp_path, os.urandom(500_000))
    folder = folder_at(tmp_path, budget=2 * state.record.fragment_bytes)
    assert take(folder, state, 0)
    assert not take(folder, state, 1, most=10)
    with pytest.raises(NoRoom, match="--state-gb"):
        take(folder, state, 2)
    assert take(folder, state, 1), "what was promised has its room"
    assert folder.used_bytes == 2 * state.record.fragment_bytes


def test_what_the_seed_has_not_asked_for_in_a_month_goes(tmp_path: Path) -> None:
    state = coded(tmp_path, b"content")
    folder = folder_at(tmp_path)
    take(folder, state, 0)
    folder.settle(1)
    now = (tmp_path / "held" / f"{1:016x}" / "record").stat().st_mtime
    assert held(folder_at(tmp_path, now=now + KEEP_S - 60)) == {state.sealed: (0,)}
    assert held(folder_at(tmp_path, now=now + KEEP_S + 60)) == {}
    assert list((tmp_path / "held").glob("*")) == []


class Died(Exception):
    """The process ended here."""


@pytest.mark.parametrize("step", range(12))
def test_whenever_a_node_dies_it_holds_the_old_state_or_the_new_one(tmp_path: Path, step: int) -> None:
    """At every step of the disk while a new state is taken and settled: the old fragment is there until the new one is
    settled, and what is left behind is no state."""
    old, new = coded(tmp_path, b"old"), coded(tmp_path, b"new", serial=2)
    folder = folder_at(tmp_path)
    take(folder, old, 0)
    folder.settle(1)
    left = step

    def before(what: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Died

    dying = FragmentFolder(tmp_path / "held", KEY.public, BUDGET, disk=Disk(before))
    left = step
    is_taken = False
    with contextlib.suppress(Died):
        is_taken = take(dying, new, 0, whole=1)
        dying.settle(2)
    again = folder_at(tmp_path)
    assert {old.sealed: (0,), new.sealed: (0,)}.items() >= held(again).items()
    assert held(again)
    assert is_taken or held(again)[old.sealed] == (0,)
    take(again, new, 0, whole=1)
    again.settle(2)
    assert held(again) == {new.sealed: (0,)}


def test_what_does_not_verify_at_a_start_is_removed(tmp_path: Path) -> None:
    state = coded(tmp_path, b"content")
    take(folder_at(tmp_path), state, 0)
    (tmp_path / "held" / f"{1:016x}" / "record").write_bytes(state.sealed[:-1] + b"x")
    assert held(folder_at(tmp_path)) == {}
    assert list((tmp_path / "held").glob("*")) == []
