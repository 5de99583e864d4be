"""What is held against one node, over its whole life: the evidence of each kind, and what it rests on."""

from dataclasses import dataclass, field

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from node.verification.evidence import THRESHOLD, Bets, Evidence, Null
from node.verification.opinions import Kind

__all__ = ["NodeRecord"]


class _Saved(msgspec.Struct, array_like=True):
    samples: int
    checks: int
    tokens: int
    opinions: int
    kinds: dict[str, dict[bytes, list[float]]]


_NONE = Evidence()
_decoder = msgspec.msgpack.Decoder(_Saved)


@dataclass(slots=True)
class NodeRecord:
    """The record of one node, as an author and as a checker."""

    samples: int = 0
    """Its accepted samples that could have been drawn for a check."""
    checks: int = 0
    """Opinions on its samples."""
    tokens: int = 0
    """Its tokens that were checked, each counted once an opinion."""
    opinions: int = 0
    """Opinions that it gave on samples of others."""
    kinds: dict[Kind, Evidence] = field(default_factory=dict)
    _most: float = 0.0
    """The most that a checker alone has ever held against it."""
    log: float = 0.0
    """The evidence of all kinds together, a natural logarithm."""

    def __post_init__(self) -> None:
        self._reckon()

    def of(self, kind: Kind) -> Evidence:
        """The evidence of one kind."""
        return self.kinds.setdefault(kind, Evidence())

    def add(self, kind: Kind, checker: bytes, null: Null, value: float) -> None:
        """`checker` found this number."""
        evidence = self.of(kind)
        evidence.add(checker, null, value)
        if (bets := evidence.checkers.get(checker)) is not None:
            self._most = max(self._most, float(bets.log_wealth))
        self._reckon()

    def _reckon(self) -> None:
        """Each kind has its share of the evidence from the start, so that a new one cannot raise it."""
        self.log = Evidence.mean_of(self.kinds.get(kind, _NONE) for kind in Kind)

    @property
    def proven(self) -> bool:
        """Whether the node is to be quarantined."""
        return self.log >= THRESHOLD

    @property
    def worst(self) -> Kind:
        """The kind with the most evidence."""
        return max(Kind, key=lambda kind: self.kinds[kind].log if kind in self.kinds else 0.0)

    def suspicious(self, least: float) -> bool:
        """Whether some checker alone holds this much against it, a natural logarithm."""
        return self._most >= least

    def to_bytes(self) -> bytes:
        """For a file."""
        kinds = {
            str(kind): {checker: bets.saved for checker, bets in evidence.checkers.items()}
            for kind, evidence in self.kinds.items()
        }
        return msgspec.msgpack.encode(_Saved(self.samples, self.checks, self.tokens, self.opinions, kinds))

    @classmethod
    def from_bytes(cls, data: bytes) -> "NodeRecord":
        """The inverse of `to_bytes`. Raises `ValueError` for what this release cannot read."""
        try:
            saved = unpack(_decoder, data, "record")
            kinds = {
                Kind(name): Evidence({checker: Bets.restored(logs) for checker, logs in checkers.items()})
                for name, checkers in saved.kinds.items()
            }
        except PeerError as error:
            raise ValueError(str(error)) from error
        return cls(saved.samples, saved.checks, saved.tokens, saved.opinions, kinds)
