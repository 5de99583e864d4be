"""The accepted samples in a ledger's file, read beside the seed that writes it."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from codec.errors import PeerError, UsageError
from codec.unpack import unpack
from node.engines.base import SamplingParams
from node.ledger.assignment.draws import drawn_with, in_its_place
from node.ledger.messages import Rollout, open_rollout

__all__ = ["AcceptedSample", "AcceptedSamples"]

_sampling: Final = msgspec.msgpack.Decoder(SamplingParams)
_COLUMNS: Final = "grp, sample, node, sealed, prompt, sampling from rollouts join groups on groups.id = rollouts.grp"


class AcceptedSample(NamedTuple):
    """`sealed`: the rollout as its node (a public key) signed it. `prompt`: packed token ids. `sampling`: of the group,
    which the lease may have replaced by portable draws."""

    group: bytes
    sample: int
    node: bytes
    sealed: bytes
    prompt: bytes
    sampling: SamplingParams

    @property
    def name(self) -> str:
        """GROUP/NUMBER."""
        return f"{self.group.hex()}/{self.sample}"

    @property
    def rollout(self) -> Rollout:
        """Raises `PeerError` when the file was damaged or altered."""
        return open_rollout(self.node, self.sealed)

    @property
    def leased(self) -> SamplingParams:
        """The sampling that was leased, and that the node signed. Raises `PeerError` as `rollout` does."""
        samplings = (self.sampling, in_its_place(self.sampling))
        found = drawn_with(self.group, self.prompt, self.rollout, samplings)
        if found is None or self.rollout.sample != self.sample:
            raise PeerError(f"ledger: sample {self.name} was signed for other work")
        return found


class AcceptedSamples:
    """An open file. Writes nothing."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db, self._path = db, path

    @classmethod
    @contextmanager
    def beside(cls, path: Path) -> "Iterator[AcceptedSamples]":
        """Open the ledger's file for `with`. A seed may be writing to it. Raises `UsageError` when there is none."""
        if not path.is_file():
            raise UsageError(f"{path.parent} has no ledger. Name the seed's folder with --home.")
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        try:
            yield cls(db, path)
        except sqlite3.Error as error:
            raise UsageError(f"Cannot read the ledger {path}: {error}.") from error
        finally:
            db.close()

    def newest(self, count: int) -> list[AcceptedSample]:
        """The `count` samples that were accepted last, the last one first."""
        query = f"select {_COLUMNS} order by rollouts.rowid desc limit ?"
        return [_sample(row) for row in self._db.execute(query, (count,))]

    def find(self, group: str, sample: int) -> AcceptedSample:
        """The sample of the group whose number in hex begins with `group`. Raises `UsageError`."""
        query = f"select {_COLUMNS} where hex(grp) like ? and sample = ? limit 2"
        found = [_sample(row) for row in self._db.execute(query, (f"{group.upper()}%", sample))]
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"Several samples begin with {group}/{sample}: give more of the group's number.")
        raise UsageError(
            f"The ledger has no accepted sample {group}/{sample}. swarm-node replay lists the newest; it keeps those "
            "of the newest 20,000 groups that a trainer took."
        )


def _sample(row: tuple[bytes, int, bytes, bytes, bytes, bytes]) -> AcceptedSample:
    group, sample, node, sealed, prompt, sampling = row
    return AcceptedSample(group, sample, node, sealed, prompt, unpack(_sampling, sampling, "ledger: sampling"))
