"""The bits that the last commit replaced on a rank, and rewinds, in which they are live again.

They are on the host: for each changed element 4 bytes for its place (8 in a storage of 2^31 elements or more) and its
old bits. `MOST_SHARE` bounds them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

__all__ = ["MOST_SHARE", "NotUndone", "OldBits", "Rewind"]

MOST_SHARE = 0.125
"""Memory of the old bits, as a share of the live weights' own: as in `node.engines.undo`."""
_SHORT = 1 << 31


class NotUndone(Exception):
    """The version before is not known. `busy`: it may be soon, because another thread reads the live weights."""

    def __init__(self, why: str, busy: bool = False) -> None:
        super().__init__(why)
        self.busy = busy


class _Part(NamedTuple):
    flat: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor


class OldBits:
    """What a staged patch will replace. `complete`: False if it was more than `most_bytes`; then nothing is kept."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self.parts: list[_Part] = []
        self.complete = True

    def add(self, flat: torch.Tensor, places: torch.Tensor) -> None:
        """Keep the live bits at `places` of a storage. Nothing may write them meanwhile."""
        if not self.complete:
            return
        short = torch.int32 if flat.numel() < _SHORT else torch.int64
        part = _Part(flat, places.to("cpu", short), flat.index_select(0, places).to("cpu"))
        self._left -= part.places.nbytes + part.bits.nbytes
        if self._left < 0:
            self.parts, self.complete = [], False
        else:
            self.parts.append(part)


class Rewind:
    """Old bits that can be made live for a moment, between two steps.

    `reading` must be held by any other thread while it reads live bits.
    """

    def __init__(self) -> None:
        self._old: OldBits | None = None
        self._live: list[torch.Tensor] | None = None
        """The live version's bits while the version before is live."""
        self._reading = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._reading:
            yield

    def set(self, old: OldBits | None) -> None:
        """Lead back by `old` from now on; None: the version before is not known."""
        self._old = old if old is not None and old.complete else None

    def undo(self) -> None:
        """Make the version before live. Raises `NotUndone` before anything is written."""
        if self._old is None:
            raise NotUndone("the version before is not known")
        if not self._reading.acquire(blocking=False):
            raise NotUndone("the live weights are being read", busy=True)
        try:
            self._live = [part.flat.index_select(0, _on_device(part)) for part in self._old.parts]
        except BaseException:
            self._reading.release()
            raise
        for part in self._old.parts:
            _write(part, part.bits.to(part.flat.device))

    def redo(self) -> None:
        """Make the version live again, and read its bits back. Does nothing if it is live.

        Raises `RuntimeError` when they are not those from before `undo`.
        """
        if self._live is None:
            return
        assert self._old is not None
        try:
            for part, bits in zip(self._old.parts, self._live):  # noqa: B905 - Python 3.10
                _write(part, bits)
            for part, bits in zip(self._old.parts, self._live):  # noqa: B905
                if not torch.equal(part.flat.index_select(0, _on_device(part)), bits):
                    raise RuntimeError("the live bits are not those from before tokens were scored under other bits")
        finally:
            self._live = None
            self._reading.release()


def _on_device(part: _Part) -> torch.Tensor:
    return part.places.to(part.flat.device, torch.int64)


def _write(part: _Part, bits: torch.Tensor) -> None:
    part.flat.index_copy_(0, _on_device(part), bits)
