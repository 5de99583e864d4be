"""Which checkpoints in a folder are complete and new: decided without a clock, a seed or a wait."""

from pathlib import Path

import pytest

from node.trainers.watch import FoundCheckpoint, Watch, scan, step_of


def found(name: str, written_ns: int, *, size: int = 100, marked: bool = False) -> FoundCheckpoint:
    return FoundCheckpoint(Path("/runs") / name, (("model.safetensors", size, written_ns),), marked)


def test_a_checkpoint_is_complete_after_the_quiet_time() -> None:
    watch = Watch(marker="", quiet_s=5.0)
    assert watch.due([found("step_1", 10)], now=0.0) is None
    assert watch.due([found("step_1", 20, size=200)], now=4.0) is None  # it still grows, so the quiet time begins again
    assert watch.due([found("step_1", 20, size=200)], now=8.9) is None
    due = watch.due([found("step_1", 20, size=200)], now=9.0)
    assert due is not None
    assert due.folder.name == "step_1"


def test_with_a_marker_only_the_marker_counts() -> None:
    watch = Watch(marker="STABLE", quiet_s=5.0)
    assert watch.due([found("step_1", 10)], now=0.0) is None
    assert watch.due([found("step_1", 10)], now=1000.0) is None
    assert watch.due([found("step_1", 10, marked=True)], now=1000.0) is not None


def test_only_the_newest_is_due_and_none_older_than_the_published() -> None:
    watch = Watch(marker="M", quiet_s=0.0)
    there = [found(name, at, marked=True) for name, at in (("step_9", 30), ("step_10", 40), ("step_8", 20))]
    due = watch.due(there, now=0.0)
    assert due is not None
    assert due.folder.name == "step_10"
    watch.note_published(due)
    assert watch.due(there, now=1.0) is None
    again = found("step_9", 50, marked=True)  # training went back and wrote it again
    assert watch.due([*there[1:], again], now=2.0) == again


def test_a_refused_checkpoint_is_due_again_only_after_a_change() -> None:
    watch = Watch(marker="", quiet_s=1.0)
    watch.due([found("step_1", 10)], now=0.0)
    due = watch.due([found("step_1", 10)], now=1.0)
    assert due is not None
    watch.note_refused(due)
    assert watch.due([found("step_1", 10)], now=100.0) is None
    assert watch.due([found("step_1", 11)], now=101.0) is None
    assert watch.due([found("step_1", 11)], now=102.0) is not None


def test_scan_finds_weights_at_any_depth_except_in_hidden_folders(tmp_path: Path) -> None:
    for name in ("step_1", "global_step_2/actor/huggingface", ".tmp/step_3", "logs"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ("events.bin" if name == "logs" else "model.safetensors")).write_bytes(b"x")
    (tmp_path / "step_1" / "STABLE").touch()
    names = {str(one.folder.relative_to(tmp_path)): one.marked for one in scan(tmp_path, "STABLE")}
    assert names == {"step_1": True, "global_step_2/actor/huggingface": False}
    assert list(scan(tmp_path / "not there", "STABLE")) == []


@pytest.mark.parametrize(("name", "step"), [("step_17", 17), ("global_step_5/actor", 5), ("latest", 0)])
def test_the_step_is_read_from_the_path(name: str, step: int) -> None:
    assert step_of(Path("/run7") / name, Path("/run7")) == step


def test_a_checkpoint_with_an_older_time_is_reported_once() -> None:
    """A checkpoint copied with its times kept, as `cp -a` does, will never be due, so it is reported."""
    watch = Watch(marker="M", quiet_s=0.0, done_ns=50)
    before = found("step_1", 10, marked=True)
    assert watch.late([before]) == [before]  # the first call returns all, and they are only counted
    late = found("step_7", 40, marked=True)
    assert watch.late([before, late]) == [late]
    assert watch.late([before, late]) == []
    assert watch.due([before, late], now=1.0) is None
    fresh = found("step_8", 60, marked=True)
    assert watch.late([before, late, fresh]) == []
    watch.note_published(fresh)
    assert watch.late([before, late, fresh]) == []
    touched = found("step_7", 70, marked=True)
    assert watch.late([before, touched, fresh]) == []
    assert watch.due([before, touched, fresh], now=2.0) == touched


def test_checkpoints_that_are_passed_over_are_logged_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from node.settings import logs
    from node.trainers.watch import PassedOverLog

    logs.configure()
    passed_over = PassedOverLog()
    passed_over.log_late([found("step_1", 1)])
    passed_over.log_late([found("step_7", 4)])
    passed_over.log_late([])
    passed_over.check_folder(tmp_path)
    passed_over.check_folder(tmp_path / "gone")
    passed_over.check_folder(tmp_path / "gone")
    passed_over.check_folder(tmp_path)
    captured = capsys.readouterr()
    lines = (captured.out + captured.err).strip().splitlines()
    assert len(lines) == 4
    assert "older_passed_over" in lines[0]
    assert "step_7" in lines[1]
    assert "touch" in lines[1]
    assert "missing" in lines[2]
    assert "found" in lines[3]


def test_a_published_checkpoint_that_loses_a_file_is_not_reported() -> None:
    weights, state = ("model.safetensors", 100, 40), ("optimizer.pt", 900, 50)
    whole = FoundCheckpoint(Path("/runs/step_1"), (weights, state), True)
    watch = Watch(marker="M", quiet_s=0.0)
    assert watch.late([whole]) == []
    watch.note_published(whole)
    assert watch.late([whole]) == []
    assert watch.late([FoundCheckpoint(whole.folder, (weights,), True)]) == []
