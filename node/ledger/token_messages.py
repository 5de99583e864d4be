"""The messages by which a node tells tokens as they are drawn, for clients that follow an answer while it is made.

They decide nothing: a sample counts when its signed rollout is accepted. Tokens whose message was lost come with that.
"""

from typing import Annotated, Final

import msgspec

from node.engines.base import DrawnTokens
from node.ledger.fields import MAX_CAPACITY, U32, U63, Leases, Packed32, Routes, WorkMessage
from node.ledger.packing import pack_floats, pack_tokens, unpack_floats, unpack_tokens

__all__ = ["MAX_DRAWN", "Drawn", "DrawnPart", "Follow"]

MAX_DRAWN: Final = 4 * MAX_CAPACITY
"""Parts of one `Drawn`: of each sequence that a node may hold, and some more after a commit."""


class Follow(WorkMessage, frozen=True, tag=21):
    """Tell the tokens of these leases as they are drawn. It comes before the leases, and only to a node that named the
    ability `STREAMS`; a node of an older release drops it."""

    leases: Leases


class DrawnPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of a sample, from number `start` on; see `node.engines.base.DrawnTokens`."""

    lease: U63
    token: U63
    sample: U32
    start: U32
    token_ids: Packed32
    logprobs: Packed32
    epoch: U32
    version: U63
    top: Routes = b""

    @classmethod
    def of(cls, lease: int, token: int, sample: int, drawn: DrawnTokens) -> "DrawnPart":
        """The part that tells `drawn`. `token`: the fencing token of the lease."""
        packed = pack_tokens(drawn.token_ids), pack_floats(drawn.logprobs)
        return cls(lease, token, sample, drawn.start, *packed, *drawn.version, drawn.top)

    @property
    def drawn(self) -> DrawnTokens:
        """Raises `ValueError` for values that no engine draws, and `PeerError` for lengths that are not whole."""
        tokens, logprobs = unpack_tokens(self.token_ids), unpack_floats(self.logprobs)
        return DrawnTokens(self.start, tokens, logprobs, (self.epoch, self.version), self.top)


class Drawn(WorkMessage, frozen=True, tag=22):
    """Tokens that a node drew since its last `Drawn`, of leases that it was asked to follow."""

    parts: Annotated[tuple[DrawnPart, ...], msgspec.Meta(min_length=1, max_length=MAX_DRAWN)]
