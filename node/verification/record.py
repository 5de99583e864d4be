"""What is held against one node, over its whole life: the evidence of each kind, and what it rests on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from codec.errors import PeerError
from codec.unpack import unpack
from node.verification.evidence import THRESHOLD, Bets, Evidence, Null
from node.verification.mismatches import Tally
from node.verification.opinions import Kind

__all__ = ["NodeRecord"]


class _Saved(msgspec.Struct, array_like=True):
    samples: int
    checks: int
    tokens: int
    opinions: int
    kinds: dict[str, dict[bytes, list[float]]]
    tallies: dict[str, Tally]


_decoder = msgspec.msgpack.Decoder(_Saved)


@dataclass(slots=True)
class NodeRecord:
    """The record of one node, as an author and as a checker."""

    samples: int = 0
    """Its accepted samples that could have been drawn for a check."""
    checks: int = 0
    """Opinions on its samples."""
    tokens: int = 0
    """Its tokens that were checked, whatever the number of opinions on them."""
    opinions: int = 0
    """Opinions that it gave on samples of others."""
    kinds: dict[Kind, Evidence] = field(default_factory=dict)
    """By checker."""
    tallies: dict[Kind, Tally] = field(default_factory=dict)
    """Of the kinds `BY_REPLAY`."""
    _most: float = 0.0
    """The most that a checker alone, or replays, have ever held against it."""
    log: float = 0.0
    """The evidence of all kinds together, a natural logarithm."""

    def __post_init__(self) -> None:
        self._reckon()

    def of(self, kind: Kind) -> Evidence:
        """The evidence of one kind, by checker."""
        return self.kinds.setdefault(kind, Evidence())

    def add(self, kind: Kind, checker: bytes, null: Null, value: float) -> None:
        """`checker` found this number."""
        evidence = self.of(kind)
        evidence.add(checker, null, value)
        if (bets := evidence.checkers.get(checker)) is not None:
            self._most = max(self._most, float(bets.log_wealth))
        self._reckon()

    def count(self, kind: Kind, context: bytes, *, mismatch: bool, others: tuple[int, int]) -> None:
        """One more sample that was replayed: see `Tally.add`."""
        tally = self.tallies.setdefault(kind, Tally())
        tally.add(context, mismatch=mismatch, others=others)
        self._most = max(self._most, tally.log)
        self._reckon()

    @property
    def logs(self) -> Mapping[Kind, float]:
        """The evidence of each kind that there is a number of."""
        found = {kind: evidence.log for kind, evidence in self.kinds.items()}
        return found | {kind: tally.log for kind, tally in self.tallies.items()}

    def _reckon(self) -> None:
        """The mean of all kinds is a supermartingale, too. Each has its share of the evidence from the start, so that a
        new one cannot raise it."""
        logs = self.logs
        self.log = float(np.logaddexp.reduce([logs.get(kind, 0.0) for kind in Kind])) - math.log(len(Kind))

    @property
    def proven(self) -> bool:
        """Whether the node is to be quarantined."""
        return self.log >= THRESHOLD

    @property
    def worst(self) -> Kind:
        """The kind with the most evidence."""
        logs = self.logs
        return max(Kind, key=lambda kind: logs.get(kind, 0.0))

    def suspicious(self, least: float) -> bool:
        """Whether some checker alone, or replays, hold this much against it, a natural logarithm."""
        return self._most >= least

    def to_bytes(self) -> bytes:
        """For a file."""
        kinds = {
            str(kind): {checker: bets.saved for checker, bets in evidence.checkers.items()}
            for kind, evidence in self.kinds.items()
        }
        tallies = {str(kind): tally for kind, tally in self.tallies.items()}
        saved = _Saved(self.samples, self.checks, self.tokens, self.opinions, kinds, tallies)
        return msgspec.msgpack.encode(saved)

    @classmethod
    def from_bytes(cls, data: bytes) -> "NodeRecord":
        """The inverse of `to_bytes`. Raises `ValueError` for what this release cannot read."""
        try:
            saved = unpack(_decoder, data, "record")
        except PeerError as error:
            raise ValueError(str(error)) from error
        kinds = {
            Kind(name): Evidence({checker: Bets.restored(logs) for checker, logs in checkers.items()})
            for name, checkers in saved.kinds.items()
        }
        tallies = {Kind(name): tally for name, tally in saved.tallies.items()}
        return cls(saved.samples, saved.checks, saved.tokens, saved.opinions, kinds, tallies)
