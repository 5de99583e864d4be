"""What a node says of a sample's reward, and the messages by which another node is asked for the same reward."""

from typing import Annotated

import msgspec

from node.engines.base import RewardAsked
from node.ledger.fields import U63, Packed32, WorkMessage
from node.rewards.outcome import MAX_WHY

__all__ = ["AskReward", "RewardAnswer", "RewardClaim"]

Why = Annotated[str, msgspec.Meta(max_length=MAX_WHY)]


class RewardClaim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The reward of a sample, as its node signs it. `value`: finite; None: the function gave none, and `why`."""

    value: float | None
    why: Why = ""


class AskReward(WorkMessage, frozen=True, tag=23):
    """Asks for the reward of `token_ids`, which follow `prompt`: of another node's sample, whose reward is not said.

    Sent only to nodes that declared the ability for this reward, with the digest of the author's function.
    """

    check: U63
    reward: RewardAsked
    prompt: Packed32
    token_ids: Packed32


class RewardAnswer(WorkMessage, frozen=True, tag=24):
    """What was computed. `value` None: the function gives no number. `declined`: this node cannot compute it now, and
    another one should be asked."""

    check: U63
    value: float | None
    declined: bool = False
