"""How many sequences a node has its engine generate at once, and how many it holds."""

from typing import Final

from node.ledger.messages import MAX_CAPACITY
from node.member.engine_client import EngineClient
from node.member.pace import Pace

__all__ = ["Batch"]

MEMORY: Final = 64
"""The mean length of sequences is that of about so many of the last ones."""


class Batch:
    """By default a node generates `Pace.batch` sequences on each engine.

    An engine with continuous batching gets more, if it says how many it runs and for how many tokens it has memory: as
    many as fit by the mean length of the sequences that it finished lately. With fewer it would be slower than it is
    without a swarm. With more than fit it would compute some of them twice, and their leases could end while they wait.
    """

    def __init__(self, engine: EngineClient, pace: Pace) -> None:
        self._engine, self._pace = engine, pace
        self.engines = 1
        """Engines that share the work."""
        self._largest = 1
        self._finished = 0
        self._length = 0.0
        """Mean tokens of a finished sequence, with its prompt; 0: none is finished."""

    def note_lease(self, samples: int) -> None:
        """A lease of so many samples came."""
        self._largest = max(self._largest, samples)

    def note_finished(self, tokens: int) -> None:
        """A sequence is finished, which has so many tokens with its prompt."""
        self._finished = min(self._finished + 1, MEMORY)
        self._length += (tokens - self._length) / self._finished

    @property
    def generated(self) -> int:
        """Sequences to generate at once."""
        usual = self._pace.batch * self.engines
        room = self._engine.room
        if not (self._engine.continuous_batching and room.sequences):
            return usual
        fit = int(room.tokens / self._length) if self._length else 0
        return min(max(usual, fit), room.sequences, MAX_CAPACITY)

    @property
    def held(self) -> int:
        """Sequences to hold, generated or waiting. With continuous batching, where places become free one by one, one
        group in reserve is enough: a sample that waits here may be begun at an older version than the ledger would
        choose."""
        batch, pace = self.generated, self._pace
        most = min(max(pace.capacity * self.engines, pace.capacity * batch // pace.batch), MAX_CAPACITY)
        return min(most, batch + max(batch // 4, self._largest)) if self._engine.continuous_batching else most
