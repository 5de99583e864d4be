"""The bits that the last commit replaced, and rewinds, in which tokens are scored under the version before.

They are on the host: for each changed element 4 bytes for its place (8 in a parameter of 2^31 elements or more) and its
old bits, as wide as the live element. At 1 % that is 3 % of the memory of bf16 weights. `MOST_SHARE` bounds it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from node.engines.base import EngineError
from node.engines.live import DevicePatch

__all__ = ["MOST_SHARE", "Undo"]

MOST_SHARE: Final = 0.125
"""Memory of the old bits, as a share of the live parameters' own. Steps of reinforcement learning need less than half
of it; a version that changes more can be told from the one before without this."""
_SHORT: Final = 1 << 31
"""Below this number of elements, places are kept in 32 bits."""


class _Part(NamedTuple):
    """Some elements of one storage. `places`, `bits`: on the host."""

    storage: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor


class Undo:
    """Leads from the live version back to the one before, for a moment."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: memory that it may keep."""
        self._most_bytes = most_bytes
        self._parts: list[_Part] = []
        self.complete = True
        """Every replaced bit is kept. False: they were more than `most_bytes`, and none is."""

    def add(self, patch: DevicePatch) -> None:
        """Keep the live bits that this patch will replace. Nothing may write the live parameters meanwhile."""
        for storage, places, _ in patch.parts if self.complete else ():
            short = torch.int32 if storage.numel() < _SHORT else torch.int64
            self._parts.append(_Part(storage, places.to("cpu", short), storage.index_select(0, places).to("cpu")))
        if self.nbytes > self._most_bytes:
            self._parts, self.complete = [], False

    @property
    def nbytes(self) -> int:
        """Memory that is held between two commits."""
        return sum(tensor.nbytes for part in self._parts for tensor in (part.places, part.bits))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """The live parameters are those of the version before while the block runs.

        No other thread may read or write them meanwhile. Afterwards the live bits are written back, even if the block
        raised, and read again. Raises `EngineError` when they are not those from before the block. The caller must
        treat any exception as a mix of two versions.
        """
        live = [part.storage.index_select(0, _on_device(part.places, part.storage)) for part in self._parts]
        try:
            for part in self._parts:
                _write(part, part.bits.to(part.storage.device))
            yield
        finally:
            for part, bits in zip(self._parts, live, strict=True):
                _write(part, bits)
        for part, bits in zip(self._parts, live, strict=True):
            if not torch.equal(part.storage.index_select(0, _on_device(part.places, part.storage)), bits):
                raise EngineError("the live bits are not those from before tokens were scored under another version")


def _on_device(places: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    return places.to(storage.device, torch.int64)


def _write(part: _Part, bits: torch.Tensor) -> None:
    part.storage.index_copy_(0, _on_device(part.places, part.storage), bits)
