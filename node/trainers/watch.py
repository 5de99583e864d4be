"""Publishes each checkpoint that appears in a folder, for trainers that only write files: `swarm-node seed --watch`.

    scan (what is there) --> Watch.due (what is complete and new) --> publish_folder (the seed's socket) --> _remember

A checkpoint is complete when its marker file exists or, for trainers that write none, when nothing in its folder has
changed for a while and its safetensors files are as long as their headers say. Of several new ones only the newest is
published: a version is the exact difference to the one before, however many optimizer steps lie between. Runs beside
the seed as a process of its own, and ends when its stdin does.
"""

import argparse
import json
import os
import re
import select
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from codec.errors import SwarmError, UsageError
from node.host.stamp import Stamp, stamp
from node.settings import logs, memory
from node.trainers.publish_files import publish_folder
from swarm.transport.base import Unreachable

__all__ = ["FoundCheckpoint", "Watch", "main", "scan", "step_of"]

POLL_S: Final = 0.5
"""Interval between two scans. A scan of some hundred folders takes milliseconds. Network file systems do not notify of
changes, so there is nothing to wait for."""
MAX_DEPTH: Final = 4
"""Folders below the watched one: trainers write as deep as `runs/global_step_5/actor/huggingface`."""
RECORD: Final = "watch.json"
"""File in SWARM_HOME that says what was published last, so that a restart does not publish an older checkpoint."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A folder with safetensors files. `files`: all files directly in it. `marked`: one of them is the marker file."""

    folder: Path
    files: Stamp
    marked: bool

    @property
    def written_ns(self) -> int:
        """When its newest file was written, in ns. Orders checkpoints, whatever their names are."""
        return max(written_ns for _, _, written_ns in self.files)


@dataclass(slots=True)
class Watch:
    """Decides which checkpoint is due. Pure: what was found and the time are arguments.

    `marker`: name of the marker file, or "". `quiet_s`: without a marker, how long a folder must not have changed.
    `done_ns`: `written_ns` of the newest checkpoint that was published.
    """

    marker: str
    quiet_s: float
    done_ns: int = 0
    _since: dict[Path, tuple[Stamp, float]] = field(default_factory=dict)
    """Of each new checkpoint, its files and since when they have not changed."""
    _refused: dict[Path, Stamp] = field(default_factory=dict)
    _known: dict[Path, Stamp] | None = None
    """The files of each checkpoint at the last call of `late`; None before the first."""

    def late(self, found: Iterable[FoundCheckpoint]) -> list[FoundCheckpoint]:
        """Checkpoints that came or changed since the last call and will never be due, because their newest file is no
        newer than what was published last. Usually they were copied with their times kept. Each is returned once; the
        first call returns all of them.
        """
        found = list(found)
        known, self._known = self._known or {}, {item.folder: item.files for item in found}
        # A deleted file is no change: trainers delete the optimizer's state of checkpoints that were published.
        return [
            item
            for item in found
            if item.written_ns <= self.done_ns and set(item.files) - set(known.get(item.folder, ()))
        ]

    def due(self, found: Iterable[FoundCheckpoint], now: float) -> FoundCheckpoint | None:
        """The newest checkpoint that is complete and newer than what was published; None: there is none yet.

        `now`: in seconds, of any monotonic clock.
        """
        found = [item for item in found if item.written_ns > self.done_ns]
        self._since = {
            item.folder: known
            if (known := self._since.get(item.folder)) is not None and known[0] == item.files
            else (item.files, now)
            for item in found
        }
        complete = [
            item
            for item in found
            if self._refused.get(item.folder) != item.files
            and (item.marked if self.marker else now - self._since[item.folder][1] >= self.quiet_s)
        ]
        return max(complete, key=lambda item: (item.written_ns, item.folder), default=None)

    def note_published(self, checkpoint: FoundCheckpoint) -> None:
        """The checkpoint was published, so nothing older is due any more."""
        self.done_ns = max(self.done_ns, checkpoint.written_ns)

    def note_refused(self, checkpoint: FoundCheckpoint) -> None:
        """The checkpoint cannot be published as it is. It is not due again until one of its files changes."""
        self._refused[checkpoint.folder] = checkpoint.files


def scan(top: Path, marker: str) -> Iterator[FoundCheckpoint]:
    """Every folder with safetensors files in it, from `top` down. A folder that vanishes meanwhile is left out."""
    return _scan(top, marker, MAX_DEPTH)


def _scan(folder: Path, marker: str, depth: int) -> Iterator[FoundCheckpoint]:
    try:
        files = stamp(folder)
        inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    names = {name for name, _, _ in files}
    if any(name.endswith(".safetensors") for name in names):
        yield FoundCheckpoint(folder, files, bool(marker) and marker in names)
    if depth > 0:
        for path in inner:
            yield from _scan(Path(path), marker, depth - 1)


def step_of(folder: Path, top: Path) -> int:
    """The trainer's step: the last number in the path below `top`, such as 500 in checkpoint-500/actor; else 0."""
    numbers = re.findall(r"\d+", str(folder.relative_to(top)))
    return int(numbers[-1][-18:]) if numbers else 0


def main() -> None:
    """Watch and publish until stdin ends."""
    arguments = argparse.ArgumentParser("watch")
    arguments.add_argument("home", type=Path)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--marker", default="")
    arguments.add_argument("--quiet-s", type=float, default=5.0)
    arguments.add_argument("--log-file", type=Path)
    options = arguments.parse_args()
    logs.configure(file=options.log_file)
    memory.give_back_promptly()
    record = options.home / RECORD
    watch = Watch(options.marker, options.quiet_s, _remembered(record))
    passed_over = PassedOverLog()
    while True:
        there = list(scan(options.folder, options.marker))
        passed_over.check_folder(options.folder)
        passed_over.log_late(watch.late(there))
        due = watch.due(there, time.monotonic())
        if due is not None and _publish(options.home, options.folder, due, watch):
            _remember(record, watch.done_ns)
        if select.select([sys.stdin], [], [], POLL_S)[0]:  # it only becomes readable when it ends, with the seed
            return


class PassedOverLog:
    """Logs what is not published, in a sentence and once."""

    def __init__(self) -> None:
        self._there, self._looked = True, False

    def check_folder(self, folder: Path) -> None:
        """Log when the watched folder has vanished, and when it is back."""
        there = folder.is_dir()
        if self._there and not there:
            _log.warning("watch_folder_missing", folder=str(folder), why="It does not exist, so nothing is published.")
        elif there and not self._there:
            _log.info("watch_folder_found", folder=str(folder))
        self._there = there

    def log_late(self, found: list[FoundCheckpoint]) -> None:
        """Log which checkpoints will never be due. The first call logs only how many, since they are older ones."""
        if not self._looked and found:
            _log.info("older_passed_over", checkpoints=len(found), why="What was published last is newer.")
        for checkpoint in found if self._looked else ():
            _log.warning(
                "not_published", folder=str(checkpoint.folder),
                why="None of its files is newer than those of the checkpoint published last, so it counts as an "
                "older one. To publish it anyway, touch its files, or run swarm-node publish FOLDER.",
            )  # fmt: skip
        self._looked = True


def _publish(home: Path, top: Path, due: FoundCheckpoint, watch: Watch) -> bool:
    """Publish a checkpoint and return whether it worked. An error is logged, since the next checkpoint may be fine."""
    try:
        report = publish_folder(home, due.folder, step=step_of(due.folder, top), as_it_was=due.files)
    except UsageError as error:
        watch.note_refused(due)
        _log.warning("not_published", folder=str(due.folder), why=str(error))
        return False
    except (Unreachable, SwarmError) as error:  # the seed is busy, full or ending: the checkpoint stays due
        _log.warning("publish_failed", folder=str(due.folder), why=str(error))
        return False
    watch.note_published(due)
    _log.info(
        "published", folder=str(due.folder), version=report["version"], density=round(report["density"], 5),
        delta_bytes=report["delta_bytes"],
    )  # fmt: skip
    return True


def _remembered(record: Path) -> int:
    """`Watch.done_ns` as the record file has it, or 0."""
    try:
        return int(json.loads(record.read_text())["written_ns"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _remember(record: Path, written_ns: int) -> None:
    """Replace the record file atomically. If a crash loses it, the newest checkpoint is published again, unchanged."""
    fresh = record.with_suffix(".new")
    fresh.write_text(json.dumps({"written_ns": written_ns}))
    fresh.replace(record)


if __name__ == "__main__":
    main()
