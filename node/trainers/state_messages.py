"""The messages by which a trainer or a command has the seed save a state, over the same socket as
`node.trainers.messages`.

    SaveState ---> StateProgress..., StateSaved

A module of its own, since a command that only asks needs neither numpy nor trio.
"""

from typing import Annotated, Literal

import msgspec

__all__ = ["SaveState", "StateAnswers", "StateProgress", "StateSaved"]

U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class SaveState(msgspec.Struct, frozen=True, tag="save-state"):
    """Asks the seed to code the file at `path`, which stays as it is until the answer, and to place it with nodes.
    `step`: the trainer's own count, for people; 0: none."""

    path: str
    step: U63 = 0


class StateProgress(msgspec.Struct, frozen=True, tag="state-progress"):
    """How far it is: bytes that are coded, or fragments that are at nodes."""

    stage: Literal["coding", "placing"]
    done: U63
    total: U63


class StateSaved(msgspec.Struct, frozen=True, tag="state-saved"):
    """Every fragment is durable at a node. `serial`: the state's number. `size`: bytes of the content. Any `needed` of
    the `total` fragments give it back. `nodes`: addresses of nodes that hold some and can be dialed."""

    serial: U63
    size: U63
    needed: U63
    total: U63
    nodes: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()


StateAnswers = StateProgress | StateSaved
"""What the seed answers, besides `Refusal`."""
