"""What we asked for, from whom, and how much of it has come.

Only what was asked for is taken in, in order, never more than its bound, and none of it counts before it is whole and
verified. A request that we gave up may still be answered; a peer may owe us a little of that, not more.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from codec.errors import PeerError
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.wire import Frame, WantBlob, WantBlock

__all__ = ["Answer", "Requests"]

_GIVEN_UP_KEPT: Final = 1024


@dataclass(slots=True)
class _Asked:
    """A request that is open."""

    want: WantBlob | WantBlock
    most: int
    exact: bool
    data: bytearray = field(default_factory=bytearray)
    label: VersionId | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """All bytes of what was asked for; not yet verified."""

    want: WantBlob | WantBlock
    label: VersionId
    data: bytes


class Requests:
    """Requests to one peer."""

    def __init__(self, late_bytes: int) -> None:
        """`late_bytes`: how much may still come of requests that were given up."""
        self._open: dict[int, _Asked] = {}
        self._given_up: OrderedDict[int, None] = OrderedDict()
        self._late_bytes = late_bytes

    def ask(self, want: WantBlob | WantBlock, most: int, *, exact: bool) -> None:
        """Note that we ask for this: `most` bytes, or just so many."""
        self._open[want.request] = _Asked(want, most, exact)

    def give_up(self, request: int) -> None:
        """It was refused, or asked of someone else."""
        if self._open.pop(request, None) is not None:
            self._given_up[request] = None
            while len(self._given_up) > _GIVEN_UP_KEPT:
                self._given_up.popitem(last=False)

    def __len__(self) -> int:
        return len(self._open)

    def oldest(self) -> int:
        return next(iter(self._open))

    def part(self, frame: Frame, body: bytes) -> Answer | None:
        """Take a PART in: the answer when this was the last, else None. Raises `PeerError`."""
        asked = self._open.get(frame.number)
        if asked is None:
            self._late(frame.number, len(body))
            return None
        label = VersionId(frame.key.epoch, frame.key.version)
        if asked.total is None:
            if frame.total > asked.most or (asked.exact and frame.total != asked.most):
                raise PeerError(f"part.total: {frame.total} bytes, at most {asked.most}")
            asked.total, asked.label = frame.total, label
        if (frame.total, label, frame.offset) != (asked.total, asked.label, len(asked.data)):
            raise PeerError("part: out of order, or of something else than its first part")
        if not body and frame.total:
            raise PeerError("part.length: empty")
        asked.data += body
        if len(asked.data) < asked.total:
            return None
        del self._open[frame.number]
        return Answer(asked.want, label, bytes(asked.data))

    def _late(self, request: int, size: int) -> None:
        if request not in self._given_up:
            raise PeerError(f"part.request: {request} was never asked for")
        self._late_bytes -= size
        if self._late_bytes < 0:
            raise PeerError("part.request: too much of what was given up")
