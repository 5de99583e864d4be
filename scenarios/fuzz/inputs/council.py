"""The kinds of messages between the machines of a council, and of the changes in its log."""

from typing import Final, get_args

from node.council.changes import Change, decode_change
from scenarios.fuzz.inputs.fields import Kind, fields_of, plain
from swarm.protocol.council import messages as council
from swarm.protocol.council.messages import CouncilMessage, Entry, Position

__all__ = ["MESSAGES", "council_kinds", "open_council"]

MESSAGES: Final[tuple[type[CouncilMessage], ...]] = get_args(council._MESSAGES)
_AT: Final = Position(3, 7)
SAMPLES: Final[dict[type[CouncilMessage], CouncilMessage]] = {
    council.Append: council.Append(3, 1.5, _AT, (Entry(3, 8, b"body"),)),
    council.Ack: council.Ack(3, 1.5, _AT, False),
    council.AskVote: council.AskVote(4, _AT, True),
    council.Vote: council.Vote(4, True, True),
    council.Release: council.Release(4, bytes(32)),
    council.HandOver: council.HandOver(4),
    council.AskHeld: council.AskHeld(4, b"manifest"),
    council.Held: council.Held(4, bytes(32)),
    council.SnapshotHead: council.SnapshotHead(4, _AT, 4096),
    council.AskKept: council.AskKept(4, "optimizer", bytes(32), 4096),
    council.LacksKept: council.LacksKept(4, bytes(32)),
    council.KeptHead: council.KeptHead(4, "optimizer", bytes(32), 4096),
}
_CHANGE: Final = Change((("delete from heads where epoch = ?", (1,)),), (("boot", b"1"),), ("grant/0",))


def council_kinds() -> list[Kind]:
    """Return a kind for every tag, and one for a change. Raises `KeyError` when `SAMPLES` lacks a message."""
    kinds = [
        Kind(
            f"Council/{cls.__name__}",
            fields_of(cls, plain(SAMPLES[cls])),
            lambda world, cls=cls: plain(SAMPLES[cls]),
            lambda world, body: body,
        )
        for cls in MESSAGES
    ]
    kinds.append(
        Kind("Council/Change", fields_of(Change, plain(_CHANGE)), lambda w: plain(_CHANGE), lambda w, body: body)
    )
    return kinds


def open_council(name: str, data: bytes) -> None:
    """Decode what a kind of this module encodes, as its first reader does."""
    if name == "Council/Change":
        decode_change(data)
    else:
        council.decode(data)
