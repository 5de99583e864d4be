"""What an engine finds out about tokens that another node says it drew: scores under two versions, and margins."""

from itertools import chain
from math import isnan
from typing import Annotated

import msgspec

from node.engines.base import SamplingParams, Version
from node.verification.draws import MOST_MARGIN

__all__ = ["Claim", "Judgement"]


class Claim(msgspec.Struct, frozen=True):
    """Tokens that a node says it drew after `prompt`, as the sample of number `stream`: judge those from `start` on.

    `previous`: score them under the version before the engine's, too. `replay`: compute the numbers as the engine does
    when it draws, and not in one pass over the text: read the text before `start`, then one token after the other with
    a cache. An engine that names the ability `REPLAYS` then has the bits of every engine of its arithmetic class.
    `adapter`: the name of the adapter that it drew by; empty: the base. The version before is not known of adapters, so
    such a judgement has no `previous`.
    Raises `ValueError` when there is nothing to judge.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stream: int
    previous: bool = False
    start: int = 0
    replay: bool = False
    adapter: Annotated[str, msgspec.Meta(max_length=64)] = ""

    def __post_init__(self) -> None:
        if not self.prompt or not 0 <= self.start < len(self.token_ids):
            raise ValueError("claim: no prompt, or no tokens to judge")
        if self.previous and self.replay:
            raise ValueError("claim: a replay is of one version")

    @property
    def tokens(self) -> int:
        """The number of tokens to judge."""
        return len(self.token_ids) - self.start


class Judgement(msgspec.Struct, frozen=True):
    """What an engine computed for the tokens of one `Claim` from its `start` on, one number a token.

    Raises `ValueError` for numbers that are not log-probabilities and margins, or not as many of each.
    """

    version: Version
    """The version that `scores` are of."""
    scores: tuple[float, ...]
    """Log-probabilities in nats, defined as those of `node.engines.interface.ScoringEngine`; -inf is possible."""
    previous: tuple[float, ...] = ()
    """The same under the version before it, the engine's last commit undone; empty: not available."""
    margins: tuple[float, ...] = ()
    """Nats by which each token loses against the winner of the portable draw: 0 to `MOST_MARGIN`, 0 if it wins. Empty:
    the sampling is not portable."""

    def __post_init__(self) -> None:
        epoch, v = self.version
        if not (0 <= epoch < 1 << 32 and 0 <= v < 1 << 63):
            raise ValueError("judgement: not a version")
        lengths = {len(found) for found in (self.scores, self.previous, self.margins) if found}
        if lengths != {len(self.scores)}:
            raise ValueError("judgement: not one number a token")
        if any(isnan(score) or score > 0.0 for score in chain(self.scores, self.previous)):
            raise ValueError("judgement: the scores are not logarithms of probabilities")
        if not all(0.0 <= margin <= MOST_MARGIN for margin in self.margins):
            raise ValueError(f"judgement: a margin outside 0 to {MOST_MARGIN:g}")
