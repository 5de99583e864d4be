"""The messages between a node and a process that computes rewards, over a socket that the process inherits.

         <------- Offered, or Unusable    once, when the functions are loaded
Prepare  ------->                         once, before the first sample
         <------- Prepared
Compute  ------->
         <------- Computed
"""

from typing import Annotated

import msgspec

from node.engines.base import MAX_REWARD_METADATA
from node.rewards.outcome import MAX_WHY

__all__ = ["Compute", "Computed", "FromWorker", "Offered", "Prepare", "Prepared", "ToWorker", "Unusable"]

Sentence = Annotated[str, msgspec.Meta(max_length=1024)]
Tokens = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...]


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """The functions are loaded. `abilities`: one for each (`NamedReward.ability`). `unusable`: a sentence for each
    entry point that could not be loaded."""

    abilities: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=64)]
    unusable: tuple[Sentence, ...] = ()


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """A function that the operator named cannot be used; `why` is for the operator."""

    why: Sentence


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Load the tokenizer, which may take longer than a reward may."""


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The tokenizer is loaded, or there is none."""


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Compute the reward `name` (without a digest) of a sample, given as token ids. `metadata`: a JSON object."""

    number: int
    name: str
    prompt: Tokens
    token_ids: Tokens
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_REWARD_METADATA)]


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """The outcome of the `Compute` with this number; see `node.rewards.outcome.Outcome`."""

    number: int
    value: float | None
    why: Annotated[str, msgspec.Meta(max_length=MAX_WHY)] = ""
    lost: bool = False


ToWorker = Prepare | Compute
FromWorker = Offered | Unusable | Prepared | Computed
