"""Whether every rollout is counted once: what the trainer was handed, beside what the seed's book has.

No two samples of `scenarios.faults.dice` have the same tokens. So a sample that was lost after it had been
accepted, and generated again, has other tokens than before; and one that is counted twice appears in two places.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from msgspec import msgpack

from codec.errors import UsageError
from node.ledger.book import LEDGER
from node.ledger.messages import Reason
from node.trainers.rollouts import group_id
from scenarios.faults.trainer import GROUPS, SAMPLES, lines_of, session_of

__all__ = ["Counting", "Miscounted"]

Samples = tuple[tuple[int, ...], ...]


DISCARDED_FOR: Final = (Reason.WRONG_REWARD, Reason.DISPUTED)
"""The reasons for which the ledger may discard an accepted sample and have it generated again, before its group is
handed over: the author could not compute its reward (its worker was killed, say), and two other nodes could."""


FORGOTTEN_FOR: Final = Reason.TOO_OLD
"""The reason for which the ledger may discard a sample of a group that *was* handed over. A seed that is killed before
it has written that a group was taken keeps the group, and has its samples generated again, for nobody, once they are
too old. A trainer that asks for the group again would get it with other samples, which `read` finds."""


class Miscounted(UsageError):
    """A rollout was lost or counted twice. The text says which."""


class Counting:
    """Reads the journal of a trainer and the book of its seed again and again.

    `groups`: how many groups were handed over, each counted once. `last_at`: when the last one was, in seconds since
    the epoch. `discarded`: samples that the book had, and that were generated again for one of `DISCARDED_FOR`.
    """

    def __init__(self, journal: Path, seeds_home: Path) -> None:
        self._journal, self._book = journal, seeds_home / LEDGER
        self._at = 0
        self._handed: dict[tuple[int, int], Samples] = {}
        self._owner: dict[tuple[int, ...], tuple[int, int]] = {}
        """The group (round, index) of each sample."""
        self._kept: dict[tuple[bytes, int], bytes] = {}
        """The hash of each accepted rollout of the book, by group and sample."""
        self._groups: dict[bytes, tuple[int, int]] = {}
        """The groups that were handed over, by their ids."""
        self.last_at = 0.0
        self.discarded = 0
        self.answers: dict[int, dict[str, Any]] = {}
        """What the trainer said of each step that it was told to publish; the last, if it said several things."""

    @property
    def groups(self) -> int:
        return len(self._handed)

    @property
    def samples(self) -> int:
        """Different samples that were handed over."""
        return len(self._owner)

    def read(self) -> None:
        """Read what is new. Raises `Miscounted`."""
        lines, self._at = lines_of(self._journal, self._at)
        for line in lines:
            if "index" in line:
                self._hand_over((line["round"], line["index"]), tuple(map(tuple, line["samples"])))
                self.last_at = line["at"]
            elif "ended" in line:
                self._end(line["ended"])
            else:
                self.answers[line["published"] if "published" in line else line["failed"]] = line

    def compare_book(self) -> int:
        """Read the book and compare it with what it had before; returns the number of its rollouts. Raises
        `Miscounted`."""
        found: dict[tuple[bytes, int], bytes] = {}
        discarded: set[tuple[bytes, int]] = set()
        forgotten: set[tuple[bytes, int]] = set()
        with closing(sqlite3.connect(f"file:{self._book}?mode=ro", uri=True, timeout=20.0)) as book:
            for group, samples, why in book.execute("select grp, samples, why from requeues where lease is null"):
                if why in DISCARDED_FOR:
                    discarded |= {(group, sample) for sample in msgpack.decode(samples)}
                elif why == FORGOTTEN_FOR and group in self._groups:
                    forgotten |= {(group, sample) for sample in msgpack.decode(samples)}
            for group, sample, sealed in book.execute("select grp, sample, sealed from rollouts"):
                found[group, sample] = blake3(sealed).digest(16)
        self.discarded, explained = len(discarded), discarded | forgotten
        for (group, sample), digest in self._kept.items():
            now = found.get((group, sample))
            if now == digest or (group, sample) in explained:
                continue
            if now is not None:
                raise Miscounted(f"the seed's book replaced sample {sample} of group {group.hex()}")
            if group not in self._groups:
                raise Miscounted(f"the seed's book lost sample {sample} of group {group.hex()}, which it had accepted")
        self._kept = found
        return len(found)

    def _hand_over(self, group: tuple[int, int], samples: Samples) -> None:
        name = f"group {group[1]} of round {group[0]}"
        if (before := self._handed.get(group)) is not None:
            if before != samples:
                raise Miscounted(f"{name} was handed over again with other samples")
            return
        if len(samples) != SAMPLES:
            raise Miscounted(f"{name} has {len(samples)} samples of {SAMPLES}")
        for tokens in samples:
            if (owner := self._owner.get(tokens)) is not None:
                raise Miscounted(f"a sample of {name} is one of group {owner[1]} of round {owner[0]} as well")
            self._owner[tokens] = group
        self._handed[group] = samples
        self._groups[group_id(session_of(group[0]), group[1])] = group

    def _end(self, number: int) -> None:
        lost = [index for index in range(GROUPS) if (number, index) not in self._handed]
        if lost:
            raise Miscounted(f"round {number} ended without the groups {lost}")
