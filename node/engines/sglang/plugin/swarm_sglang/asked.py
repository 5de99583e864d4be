"""What the driver asks of one request beyond SGLang's own parameters. Both ends import it; it needs msgspec alone.

It travels in SGLang's `custom_params`, as JSON texts: `OPTIONS` and `ASKED`.
"""

import msgspec

__all__ = ["ASKED", "MARK", "OPTIONS", "OURS", "Asked", "Scoring"]

OURS = "swarm-"
"""Ids of the driver's requests begin with it."""
OPTIONS = "swarm"
"""The options of a request, as JSON of `swarm_vllm.messages.Options`."""
ASKED = "swarm_asked"
"""`Asked`, as JSON."""
MARK = 1.0
"""Added to the margin that stands in the place of the likeliest token's log-probability, where tokens are judged. No
log-probability is above 0, so SGLang's own number cannot be taken for a margin."""


class Scoring(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens that are scored were drawn. `widest_top_p`, `tightest_top_p`: the cuts that rounding may have
    made. `temperature` 0: greedy."""

    temperature: float
    top_p: float
    widest_top_p: float
    tightest_top_p: float = 1.0


class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """`prompt`: the number of tokens at the beginning that are the prompt; the others of the text were drawn.

    `noise`: seed and stream of portable draws. `scoring`: score the text's tokens after the prompt in one pass.
    `claimed`: put these tokens in the place of drawn ones, and tell by how much each loses. `stops`: the tokens that
    `min_tokens` excludes, where they do not end the request.
    """

    prompt: int
    noise: tuple[int, int] | None = None
    scoring: Scoring | None = None
    claimed: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
