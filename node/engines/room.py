"""How much an inference server computes at a time, as it says itself."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

__all__ = ["NO_ROOM_TOLD", "Room", "together"]

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Room(msgspec.Struct, frozen=True, array_like=True):
    """`sequences`: that it continues side by side. `tokens`: of all of them together, prompts included, for which it
    can keep keys and values. 0: it does not say."""

    sequences: Count = 0
    tokens: Count = 0


NO_ROOM_TOLD = Room()


def together(rooms: Sequence[Room]) -> Room:
    """The room of several servers; what one of them does not say is not known of all."""
    sequences, tokens = ([getattr(room, name) for room in rooms] for name in ("sequences", "tokens"))
    return Room(*(sum(counts) if all(counts) else 0 for counts in (sequences, tokens)))
