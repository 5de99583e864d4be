"""Open requests to one peer, and what has arrived of each answer.

Only requested bytes are accepted, in order and within their bound, and an answer counts once it is complete and
verified. A request that was given up may still be answered; those bytes are bounded too.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from codec.errors import PeerError
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.wire import Frame, WantBlob, WantBlock

__all__ = ["PeerAnswer", "Requests"]

_GIVEN_UP_KEPT: Final = 1024
"""Numbers of given-up requests that are remembered for each peer."""


@dataclass(slots=True)
class _OpenRequest:
    want: WantBlob | WantBlock
    max_bytes: int
    exact: bool
    """The answer has `max_bytes`, no less."""
    data: bytearray = field(default_factory=bytearray)
    label: VersionId | None = None
    """Version and total size, as the first part announced them."""
    total: int | None = None


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """All bytes of an answer, not yet verified. `label`: the version that the peer says they are of."""

    want: WantBlob | WantBlock
    label: VersionId
    data: bytes


class Requests:
    """Requests to one peer, oldest first."""

    def __init__(self, late_bytes: int) -> None:
        """`late_bytes`: how many bytes may still arrive for requests that were given up."""
        self._open: dict[int, _OpenRequest] = {}
        self._given_up: OrderedDict[int, None] = OrderedDict()
        self._late_bytes = late_bytes

    def note(self, want: WantBlob | WantBlock, max_bytes: int, *, exact: bool) -> None:
        """Note a request that is being sent. The answer has at most `max_bytes`; with `exact`, exactly as many."""
        self._open[want.request] = _OpenRequest(want, max_bytes, exact)

    def give_up(self, request: int) -> None:
        """The peer refused this request, or it was sent to another peer."""
        if self._open.pop(request, None) is not None:
            self._given_up[request] = None
            while len(self._given_up) > _GIVEN_UP_KEPT:
                self._given_up.popitem(last=False)

    def __len__(self) -> int:
        return len(self._open)

    def oldest(self) -> int:
        """The number of the oldest open request."""
        return next(iter(self._open))

    def add_part(self, frame: Frame, body: bytes | memoryview) -> PeerAnswer | None:
        """Add a PART frame. Returns the answer when this part completes it. Raises `PeerError`."""
        request = self._open.get(frame.number)
        if request is None:
            self._discard_late_part(frame.number, len(body))
            return None
        label = VersionId(frame.key.epoch, frame.key.version)
        if request.total is None:
            if frame.total > request.max_bytes or (request.exact and frame.total != request.max_bytes):
                raise PeerError(f"part.total: {frame.total} bytes, at most {request.max_bytes}")
            request.total, request.label = frame.total, label
        if (frame.total, label, frame.offset) != (request.total, request.label, len(request.data)):
            raise PeerError("part: out of order, or of something else than its first part")
        if not body and frame.total:
            raise PeerError("part.length: empty")
        request.data += body
        if len(request.data) < request.total:
            return None
        del self._open[frame.number]
        return PeerAnswer(request.want, label, bytes(request.data))

    def _discard_late_part(self, request: int, size: int) -> None:
        if request not in self._given_up:
            raise PeerError(f"part.request: {request} was never asked for")
        self._late_bytes -= size
        if self._late_bytes < 0:
            raise PeerError("part.request: too much of what was given up")
