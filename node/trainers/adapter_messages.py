"""The messages by which a command lists and removes adapters, over the same socket as `node.trainers.messages`.

AskAdapters ---> Adapters
RemoveAdapter ---> AdapterRemoved
"""

from typing import Annotated

import msgspec

__all__ = ["AdapterRemoved", "AdapterRow", "Adapters", "AskAdapters", "RemoveAdapter"]

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class AskAdapters(msgspec.Struct, frozen=True, tag="ask-adapters"):
    """Asks for the swarm's adapters."""


class AdapterRow(msgspec.Struct, frozen=True):
    """A published adapter. `version`: its own, how many versions have changed it. `modules`: how many it adapts.
    `rank`: the highest. `attached`: a trainer publishes it at the moment."""

    name: str
    slot: int
    version: int
    rank: int
    modules: int
    attached: bool


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """The adapters, in the order of their slots. `slots`: how many adapters there is room for. `rank`: the highest that
    a slot has room for."""

    adapters: tuple[AdapterRow, ...]
    slots: int
    rank: int


class RemoveAdapter(msgspec.Struct, frozen=True, tag="remove-adapter"):
    """Asks the seed to publish a version without the adapter `name`."""

    name: Annotated[str, msgspec.Meta(max_length=256)]


class AdapterRemoved(msgspec.Struct, frozen=True, tag="adapter-removed"):
    """The version without the adapter is durable, signed and on its way. `root`: over all parts. `delta_bytes`: its
    payload."""

    epoch: U32
    version: U63
    root: Hash
    delta_bytes: U63
