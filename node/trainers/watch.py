"""A folder of checkpoints as a publisher, for trainers that only write files: `swarm-node seed --watch FOLDER`.

    scan (what lies there) --> Watch.due (what is whole, and new) --> publish_folder (the seed's socket) --> remember

A checkpoint is whole when its marker file is there or, where the trainer writes none, when nothing in its folder has
changed for a while and its safetensors files are as long as their headers say. Of several new ones only the newest is
published: a version is the exact difference to the one before, however many optimizer steps lie between. Runs beside
the seed, as a process of its own, and ends when its stdin does.
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
from node.settings import logs
from node.trainers.publish_files import Stamp, publish_folder, stamp
from swarm.transport.base import Unreachable

__all__ = ["Found", "Watch", "main", "scan", "step_of"]

POLL_S: Final = 0.5
"""Listing some hundred folders takes milliseconds; and network file systems tell nobody when a file changes."""
MAX_DEPTH: Final = 4
"""`runs/global_step_5/actor/huggingface`: as deep as trainers put them."""
RECORD: Final = "watch.json"
"""In SWARM_HOME: what was published last, so that a restart does not go back to an older checkpoint."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A folder with weights in it. `files`: what lies in it; `marked`: the marker file does."""

    folder: Path
    files: Stamp
    marked: bool

    @property
    def written_ns(self) -> int:
        """When its newest file was written: what orders checkpoints, whatever they are called."""
        return max(written_ns for _, _, written_ns in self.files)


@dataclass(slots=True)
class Watch:
    """Which checkpoint is due. Pure: what lies there and the time are arguments.

    `quiet_s`: for how long nothing may have changed, where no marker is awaited. `done_ns`: `written_ns` of the newest
    one published.
    """

    marker: str
    quiet_s: float
    done_ns: int = 0
    _since: dict[Path, tuple[Stamp, float]] = field(default_factory=dict)
    _refused: dict[Path, Stamp] = field(default_factory=dict)
    _known: dict[Path, Stamp] | None = None

    def late(self, found: Iterable[Found]) -> list[Found]:
        """Those that have come or changed since the last call and will never be due, because the newest of their files
        is no newer than what was published last: copied with the time of writing kept, as a rule. Each once; of what
        was there at the first call, all, for whoever counts them."""
        found = list(found)
        known, self._known = self._known or {}, {one.folder: one.files for one in found}
        # A file that went is no change: trainers delete the optimizer's state of checkpoints that were published.
        return [
            one for one in found if one.written_ns <= self.done_ns and set(one.files) - set(known.get(one.folder, ()))
        ]

    def due(self, found: Iterable[Found], now: float) -> Found | None:
        """The newest checkpoint that is whole and newer than what was published; None: nothing to do yet."""
        found = [one for one in found if one.written_ns > self.done_ns]
        self._since = {
            one.folder: known
            if (known := self._since.get(one.folder)) is not None and known[0] == one.files
            else (one.files, now)
            for one in found
        }
        whole = [
            one
            for one in found
            if self._refused.get(one.folder) != one.files
            and (one.marked if self.marker else now - self._since[one.folder][1] >= self.quiet_s)
        ]
        return max(whole, key=lambda one: (one.written_ns, one.folder), default=None)

    def published(self, one: Found) -> None:
        """It is out: nothing older is due any more."""
        self.done_ns = max(self.done_ns, one.written_ns)

    def refuse(self, one: Found) -> None:
        """It cannot be published as it is: not again until something in it changes."""
        self._refused[one.folder] = one.files


def scan(top: Path, marker: str) -> Iterator[Found]:
    """Every folder with safetensors files in it, from `top` down. What vanishes meanwhile is not there."""
    return _scan(top, marker, MAX_DEPTH)


def _scan(folder: Path, marker: str, depth: int) -> Iterator[Found]:
    try:
        files = stamp(folder)
        inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    names = {name for name, _, _ in files}
    if any(name.endswith(".safetensors") for name in names):
        yield Found(folder, files, bool(marker) and marker in names)
    if depth > 0:
        for path in inner:
            yield from _scan(Path(path), marker, depth - 1)


def step_of(folder: Path, top: Path) -> int:
    """The trainer's count, for people: the last number in the path below `top`, as in checkpoint-500/actor; else 0."""
    numbers = re.findall(r"\d+", str(folder.relative_to(top)))
    return int(numbers[-1][-18:]) if numbers else 0


def main() -> None:
    """Watch until stdin ends."""
    arguments = argparse.ArgumentParser("watch")
    arguments.add_argument("home", type=Path)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--marker", default="")
    arguments.add_argument("--quiet-s", type=float, default=5.0)
    asked = arguments.parse_args()
    logs.configure()
    record = asked.home / RECORD
    watch = Watch(asked.marker, asked.quiet_s, _remembered(record))
    said = Said()
    while True:
        there = list(scan(asked.folder, asked.marker))
        said.folder(asked.folder)
        said.late(watch.late(there))
        due = watch.due(there, time.monotonic())
        if due is not None and _publish(asked.home, asked.folder, due, watch):
            _remember(record, watch.done_ns)
        if select.select([sys.stdin], [], [], POLL_S)[0]:  # nobody writes to it: it has ended, and so has the seed
            return


class Said:
    """What is passed over is said in a sentence, once."""

    def __init__(self) -> None:
        self._there, self._looked = True, False

    def folder(self, folder: Path) -> None:
        """Say when the watched folder is gone, and when it is there again."""
        there = folder.is_dir()
        if self._there and not there:
            _log.warning("watch_folder_missing", folder=str(folder), why="It is not there, so nothing is published.")
        elif there and not self._there:
            _log.info("watch_folder_found", folder=str(folder))
        self._there = there

    def late(self, found: list[Found]) -> None:
        """Say which will never be due. At the first look, how many: they are there since before this process."""
        if not self._looked and found:
            _log.info("older_passed_over", checkpoints=len(found), why="What was published last is newer.")
        for one in found if self._looked else ():
            _log.warning(
                "not_published", folder=str(one.folder),
                why="None of its files is newer than those of the checkpoint published last, so it counts as an "
                "older one. To publish it all the same: touch its files, or swarm-node publish FOLDER.",
            )  # fmt: skip
        self._looked = True


def _publish(home: Path, top: Path, due: Found, watch: Watch) -> bool:
    """Whether it went out. Whatever is wrong with one checkpoint, the next may be well."""
    try:
        report = publish_folder(home, due.folder, step=step_of(due.folder, top), as_it_was=due.files)
    except UsageError as error:
        watch.refuse(due)
        _log.warning("not_published", folder=str(due.folder), why=str(error))
        return False
    except (Unreachable, SwarmError) as error:  # the seed is busy, full or going: the checkpoint stays due
        _log.warning("publish_failed", folder=str(due.folder), why=str(error))
        return False
    watch.published(due)
    _log.info(
        "published", folder=str(due.folder), version=report["version"], density=round(report["density"], 5),
        delta_bytes=report["delta_bytes"],
    )  # fmt: skip
    return True


def _remembered(record: Path) -> int:
    try:
        return int(json.loads(record.read_text())["written_ns"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _remember(record: Path, written_ns: int) -> None:
    """Whole or not at all; lost in a crash, the newest checkpoint is published once more, and changes nothing."""
    fresh = record.with_suffix(".new")
    fresh.write_text(json.dumps({"written_ns": written_ns}))
    fresh.replace(record)


if __name__ == "__main__":
    main()
