"""What of a stream its client has, as notes from which another seed goes on when this one ends. Pure.

A note belongs to one part of the stream. It has the tokens of that part and what the texts of later parts depend on, so
that replaying all notes restores the state of the encoder.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from codec.errors import PeerError
from codec.unpack import unpack
from node.engines.base import MAX_TOP, Version
from node.engines.top_logprobs import PAIR, is_top
from node.gateway.followed_sample import Ending, Piece
from node.ledger.fields import MAX_TOKENS
from node.ledger.packing import unpack_floats, unpack_tokens

__all__ = ["NOTHING", "Began", "Ended", "Past", "Sent", "drawn_of", "note_of", "read_notes", "sent_piece"]

NOTHING: Final = b""
"""The note of a part that has nothing of the answer."""

Tokens = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]


class Began(msgspec.Struct, frozen=True, tag="began", array_like=True):
    """What is chosen once for a stream: the end of its `id`, its `created`, and the seed of a request without one."""

    answer_id: str
    created: int
    seed: int


class Sent(msgspec.Struct, frozen=True, tag="sent", array_like=True):
    """More of one choice: see `Piece`. `tokens` and `logprobs`: 32-bit numbers, little-endian."""

    choice: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Tokens
    logprobs: Tokens
    top: Annotated[bytes, msgspec.Meta(max_length=MAX_TOKENS * MAX_TOP * PAIR.itemsize)]
    versions: list[tuple[Version, int]]
    ending: Ending | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """The client has the end of the stream."""


class Past(msgspec.Struct, frozen=True):
    """All notes of a stream. `began`: None: the client has nothing of it."""

    began: Began | None
    sent: list[Sent]
    ended: bool

    @property
    def tokens(self) -> int:
        """That the client has."""
        return sum(len(each.tokens) for each in self.sent) // 4


_decoder: "msgspec.msgpack.Decoder[Any]" = msgspec.msgpack.Decoder(list[Began | Sent | Ended])


def note_of(entries: Sequence[Began | Sent | Ended]) -> bytes:
    """The note of a part."""
    return msgspec.msgpack.encode(entries)


def sent_piece(choice: int, piece: Piece) -> Sent:
    """The entry of a piece that is about to be sent."""
    packed = array("I", piece.tokens).tobytes(), array("f", piece.logprobs).tobytes()
    return Sent(choice, *packed, piece.top, list(piece.versions), piece.ending)


def read_notes(notes: Sequence[bytes], top_logprobs: int = 0) -> Past:
    """The past of a stream with so many likeliest tokens of each draw. Raises `PeerError` for what is no note, or not
    after those before it."""
    entries = [entry for note in notes if note for entry in unpack(_decoder, note, "note")]
    sent = [entry for entry in entries if isinstance(entry, Sent)]
    counts: dict[int, int] = {}
    for each in sent:
        counts[each.choice] = _checked_count(each, counts.get(each.choice, 0), top_logprobs)
    return Past(
        next((entry for entry in entries if isinstance(entry, Began)), None),
        sent,
        any(isinstance(entry, Ended) for entry in entries),
    )


def _checked_count(sent: Sent, before: int, top_logprobs: int) -> int:
    """The tokens of the choice so far. Raises `PeerError` unless there is a log-probability and a version for each."""
    more = len(sent.tokens) // 4
    count = before + more
    ends = [0, *(end for _, end in sent.versions)]
    whole = len(sent.tokens) == len(sent.logprobs) and is_top(sent.top, more, top_logprobs)
    if not whole or ends != sorted(ends) or ends[-1] != count or count > MAX_TOKENS:
        raise PeerError("note: it does not go with those before it")
    return count


def drawn_of(sent: Sent) -> tuple[tuple[int, ...], tuple[float, ...], bytes]:
    """(token ids, log-probabilities, `Piece.top`)."""
    return unpack_tokens(sent.tokens), unpack_floats(sent.logprobs), sent.top
