"""The process of a trainer: it publishes the folders that it is told to, and takes rollouts all the time.

    python -m scenarios.faults.trainer --home SEEDS_HOME --journal FILE

Each line of its standard input is one request: `publish STEP FOLDER`. It writes one JSON object a line to the journal,
each in one call, so that a line is there or not when the process is killed:

    {"round": 3, "index": 0, "samples": [[5, 81, ...], ...], "at": 1790000000.0}     a group was handed over
    {"ended": 3}                                                                     all groups of the round were
    {"published": 7, "root": "..."}    {"failed": 7, "why": "..."}                   the answer to a request

A round has the same prompts under a key of its own. A trainer that is started again goes on with the first round that
has not ended.
"""

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from codec.errors import SwarmError
from node.engines.base import SamplingParams
from node.trainers.api import Swarm
from node.trainers.prompts import PromptSpec
from node.trainers.publish_files import publish_folder
from swarm.transport.base import Unreachable

__all__ = ["GROUPS", "SAMPLES", "lines_of", "main", "session_of"]

GROUPS: Final = 4
"""Prompts of a round."""
SAMPLES: Final = 2
"""Of a prompt."""
TOKENS: Final = 16
"""Of a sample: about 100 random bits."""
MAX_LAG: Final = 64
"""No rollout of a group that is to be handed over becomes too old: one that is missing is then one that was lost."""
PAUSE_S: Final = 0.5
"""Between two rounds."""
GROUP_WITHIN_S: Final = 120.0
SEED_WITHIN_S: Final = 60.0
LOOK_S: Final = 0.2
"""Between two looks for a seed that does not run."""


def session_of(number: int) -> str:
    """The key of a round."""
    return f"round {number}"


def lines_of(journal: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """(the whole lines of a journal from byte `start`, where the next one begins)."""
    if not journal.exists():
        return [], 0
    with journal.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], start + len(whole)


class _Journal:
    """Appends lines; any thread may."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def write(self, **line: Any) -> None:
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def _prompts(number: int) -> Iterator[PromptSpec]:
    for index in range(GROUPS):
        yield PromptSpec([1 + number % 50, 2, 3 + index], reward_metadata={"required": []})


def _take_rollouts(swarm: Swarm, first: int, journal: _Journal) -> None:
    sampling = SamplingParams(max_tokens=TOKENS)
    for number in count(first):
        stream = swarm.rollouts(
            list(_prompts(number)), SAMPLES, sampling, key=session_of(number), reward="json_valid",
            timeout_s=GROUP_WITHIN_S,
        )  # fmt: skip
        for group in stream:
            samples = [rollout.token_ids for rollout in group.rollouts]
            journal.write(round=number, index=group.index, samples=samples, at=time.time())
        journal.write(ended=number)
        time.sleep(PAUSE_S)


def _publish(home: Path, folder: Path, step: int) -> dict[str, Any]:
    """Publish a folder; a seed that does not run is waited for, as `Swarm.publish` does."""
    deadline = time.monotonic() + SEED_WITHIN_S
    while True:
        try:
            return publish_folder(home, folder, step=step)
        except Unreachable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOOK_S)


def _or_end(work: Any, *arguments: Any) -> None:
    """Run `work`; after an error the whole process ends, so that a process that watches it sees it."""
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Serve requests until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    options = parser.parse_args()
    ended = [line["ended"] for line in lines_of(options.journal)[0] if "ended" in line]
    journal = _Journal(options.journal)
    with Swarm.attach(home=options.home, start=False, max_lag=MAX_LAG) as swarm:
        arguments = (_take_rollouts, swarm, max(ended, default=-1) + 1, journal)
        threading.Thread(target=_or_end, args=arguments, daemon=True).start()
        for line in sys.stdin:
            _, step, folder = line.split(maxsplit=2)
            try:
                published = _publish(options.home, Path(folder.strip()), int(step))
            except SwarmError as error:
                journal.write(failed=int(step), why=f"{type(error).__name__}: {error}")
            else:
                journal.write(published=int(step), root=published["root"])


if __name__ == "__main__":
    main()
