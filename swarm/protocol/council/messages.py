"""The messages between the machines of a council, and their bounds.

The transport proves the key of the other end, and each message has its sender's term: a machine refuses what a leader
of an older term than its own says.
"""

from typing import Annotated, Final, NamedTuple

import msgspec

from codec.unpack import unpack

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_ENTRIES",
    "MAX_MESSAGE_BYTES",
    "MAX_SNAPSHOT_BYTES",
    "START",
    "Ack",
    "Append",
    "AskHeld",
    "AskKept",
    "AskVote",
    "CouncilMessage",
    "Entry",
    "HandOver",
    "Held",
    "KeptHead",
    "LacksKept",
    "Position",
    "Release",
    "SnapshotHead",
    "Vote",
    "decode",
    "encode",
]

MAX_BODY_BYTES: Final = 64 << 20
"""Of one entry."""
MAX_ENTRIES: Final = 256
"""In one `Append`."""
MAX_MESSAGE_BYTES: Final = MAX_BODY_BYTES + (8 << 20)
"""One entry of the largest size, or several of some megabytes together."""
MAX_SNAPSHOT_BYTES: Final = 1 << 38
"""256 GiB."""

U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Seconds of the sender's clock. The bounds also keep NaN and infinity out of arithmetic."""


class Position(NamedTuple):
    """The place of an entry in the log. Two logs that have an entry at one position agree up to there; of two logs the
    one with the higher last position has all that a majority has acknowledged."""

    term: U63
    index: U63  # pyright: ignore[reportIncompatibleMethodOverride] - nobody looks for a value in a position


START: Final = Position(0, 0)
"""Of an empty log."""


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An entry of the log. The core does not look into `body`."""

    term: U63
    index: U63
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]

    @property
    def position(self) -> Position:
        return Position(self.term, self.index)


class CouncilMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. `term`: the sender's, or the one that a candidate asks to be elected for."""

    term: U63


class Append(CouncilMessage, frozen=True, tag=1):
    """Leader to follower: store these entries after `before`, and lend me the lead. Without entries a renewal only."""

    sent_at: Time
    """The leader's clock; comes back in the `Ack`."""
    before: Position
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]


class Ack(CouncilMessage, frozen=True, tag=2):
    """Follower to leader: my log ends at `last`. If `last` is of the leader's term, or the leader finds it in its own
    log, the follower has stored all entries up to there; otherwise it needs a snapshot."""

    sent_at: Time
    """Of the `Append` that is answered, and that lends the lead. 0: the lead is not lent."""
    last: Position
    gap: bool
    """Whether what was sent does not follow `last`, so that entries before it are needed."""


class AskVote(CouncilMessage, frozen=True, tag=3):
    """Candidate to all: elect me for `term`. `binding` False: would you? Nothing is stored for such an answer."""

    last: Position
    """Of the candidate's log."""
    binding: bool


class Vote(CouncilMessage, frozen=True, tag=4):
    """Answer to `AskVote`. `granted` False: no, and the highest term that I know is `term`."""

    binding: bool
    granted: bool


class Release(CouncilMessage, frozen=True, tag=5):
    """Leader to all: I lead no more, so your promises to me are over. Vote at once."""

    to: bytes
    """The key of the machine that is to campaign first; empty: any."""


class HandOver(CouncilMessage, frozen=True, tag=6):
    """Follower to leader, on a person's request: stop, and hand the lead to me."""


class AskHeld(CouncilMessage, frozen=True, tag=7):
    """Leader to all, before it proposes a seal: have you all chunks of this version on disk? For the runtime, as the
    two messages below."""

    manifest: Annotated[bytes, msgspec.Meta(max_length=4 << 20)]
    """Sealed, but not a seal yet: the version counts once its seal is established."""


class Held(CouncilMessage, frozen=True, tag=8):
    """Answer to `AskHeld`: yes. A machine that lacks some says nothing, and is asked again."""

    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """BLAKE3 of the manifest."""


class SnapshotHead(CouncilMessage, frozen=True, tag=9):
    """Leader to follower, on a stream of its own: a snapshot of `size` bytes follows."""

    last: Position
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_SNAPSHOT_BYTES)]


class AskKept(CouncilMessage, frozen=True, tag=10):
    """Leader to all: have you this file of the trainer? The answer is `Held`, or `LacksKept`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """BLAKE3 of the file."""
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SNAPSHOT_BYTES)]


class LacksKept(CouncilMessage, frozen=True, tag=11):
    """Answer to `AskKept`: send it to me."""

    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class KeptHead(CouncilMessage, frozen=True, tag=12):
    """Leader to follower, on a stream of its own: a file of the trainer, of `size` bytes, follows."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_SNAPSHOT_BYTES)]


_MESSAGES = (
    Append | Ack | AskVote | Vote | Release | HandOver | AskHeld | Held | SnapshotHead | AskKept | LacksKept | KeptHead
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_MESSAGES)


def encode(message: CouncilMessage) -> bytes:
    """The message as it travels."""
    return _encoder.encode(message)


def decode(data: bytes) -> CouncilMessage:
    """Raises `PeerError` for anything but one valid message."""
    return unpack(_decoder, data, "council message")
