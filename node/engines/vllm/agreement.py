"""Whether a vLLM that proposes tokens by a draft model draws what it says, measured when it has been filled.

vLLM's rejection sampler continues a few made-up texts, and the drawn tokens are then scored. The scores come from
another path than the reported log-probabilities: the text is read in one pass, without the draft model. They differ
where the sampler drew or reported by other parameters than the request's.
"""

from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from codec.errors import UsageError
from node.engines.base import EngineError, Prompt, SamplingParams
from node.engines.vllm.flights import Flights, begin_score
from node.engines.vllm.links import PluginLink
from node.engines.vllm.plugin.swarm_vllm.messages import Front

__all__ = ["check_agreement"]

_TEXTS: Final = 4
_PROMPT_TOKENS: Final = 24
_TOKENS: Final = 24
_WITHIN_S: Final = 600.0
_MOST_NATS: Final = 1.0
"""By which a token's score may differ from its log-probability. bfloat16 moves one by 0.06; a token that should have
been cut off has a score of minus infinity."""
_FLIGHT: Final = -1
"""The numbers of the node's flights are above 0."""
_SAMPLING: Final = SamplingParams(_TOKENS, temperature=0.8, top_p=0.9, seed=1)


def check_agreement(front: PluginLink, version: str) -> None:
    """Draw and score. `version`: what the vLLM holds, as `flights.begin_score` has it. No commit may fall into it.

    Raises `UsageError` when scores and log-probabilities are not the same, and `EngineError` when vLLM fails.
    """
    hello = front.hello
    assert isinstance(hello, Front)
    random = np.random.default_rng(0)
    length = max(1, min(_PROMPT_TOKENS, hello.longest - _TOKENS - 1))
    texts = random.integers(0, hello.vocabulary, (_TEXTS, length)).tolist()
    prompts = [Prompt(tuple(text), i) for i, text in enumerate(texts)]
    drawn: Future[Any] = Future()
    Flights().begin(front, _FLIGHT, prompts, _SAMPLING, lambda _, outcome: _settle(drawn, outcome))
    scored: list[Future[Any]] = []
    completions = drawn.result(_WITHIN_S)
    for prompt, completion in zip(prompts, completions, strict=True):
        future: Future[Any] = Future()
        begin_score(
            front, version, prompt.token_ids, completion.token_ids, _SAMPLING, lambda found, f=future: _settle(f, found)
        )
        scored.append(future)
    scores = np.concatenate([future.result(_WITHIN_S) for future in scored])
    told = np.concatenate([completion.logprobs for completion in completions])
    if not bool((np.abs(scores - told) <= _MOST_NATS).all()):
        raise UsageError(
            "With a draft model this vLLM draws other tokens than requests ask for, or reports other log-probabilities "
            "than theirs: use --draft-tokens 0, or another release of vLLM."
        )


def _settle(future: "Future[Any]", outcome: Any) -> None:
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
