"""The base of the messages between nodes and the ledger, the limits of their fields, and the types of these fields."""

from typing import Annotated, Final

import msgspec

from node.engines.base import ADAPTER_NAME

__all__ = [
    "MAX_ADAPTERS",
    "MAX_BODY_BYTES",
    "MAX_CAPACITY",
    "MAX_PARTS",
    "MAX_ROLLOUT_BYTES",
    "MAX_TOKENS",
    "PART_BYTES",
    "U32",
    "U63",
    "AdapterName",
    "GroupId",
    "Leases",
    "Packed32",
    "Root",
    "Routes",
    "Samples",
    "Seconds",
    "TokensPerS",
    "WorkMessage",
]

MAX_BODY_BYTES: Final = 1 << 20
"""The swarm's limit for the body of a `Work` message."""
MAX_TOKENS: Final = 1 << 16
"""Tokens of a prompt, and of a sample. A sample has 8 bytes per token, log-probability included: half of a body."""
MAX_ADAPTERS: Final = 64
"""Adapters that an engine can have loaded: as many as a swarm has slots for."""
PART_BYTES: Final = MAX_BODY_BYTES - 256
"""Of all parts of a rollout but the last."""
MAX_PARTS: Final = 24
MAX_ROLLOUT_BYTES: Final = MAX_PARTS * PART_BYTES
"""A sealed rollout with its routes: 65,536 tokens of a large mixture of experts have some 20 MB."""
MAX_CAPACITY: Final = 4096
"""Sequences that one node may hold at once."""

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
TokensPerS = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Root = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
GroupId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Packed32 = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS)]
Leases = Annotated[tuple[U63, ...], msgspec.Meta(max_length=MAX_CAPACITY)]
AdapterName = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{ADAPTER_NAME.pattern})\Z", max_length=64)]
Routes = Annotated[bytes, msgspec.Meta(max_length=MAX_ROLLOUT_BYTES)]
Samples = Annotated[tuple[U32, ...], msgspec.Meta(min_length=1, max_length=MAX_CAPACITY)]


class WorkMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages between a node and the ledger."""
