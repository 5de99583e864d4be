"""vLLM's parameters of a request that draws tokens, or replays claimed ones."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import json
import struct
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from .draws import NOISE
from .messages import Generate, Judge, Options
from .replays import REPLAY
from .routed import ROUTES
from .scores import of_prompt
from .structured import BEGUN

__all__ = ["MIN_LOGPROB", "adapting", "drawing", "likeliest", "prompt_scores", "replaying"]

MIN_LOGPROB = -1e4
"""As in `node.engines.base`."""
_PAIR = struct.Struct("<If")


def adapting(adapter: int) -> LoRARequest | None:
    """What names the adapter of this id in a request; None for 0. The path is never opened: every rank has the weights.

    The name is the id's alone. Prefixes that other versions of the adapter computed are kept apart by salts (`core`).
    """
    return LoRARequest(f"swarm-{adapter}", adapter, "/swarm/adapter") if adapter else None


def drawing(message: Generate, i: int) -> SamplingParams:
    """The parameters of the request of prompt `i`."""
    options = message.options or Options()
    portable = bool(message.streams)
    more: dict[str, Any] = {NOISE: [message.seed, message.streams[i]]} if portable else {}
    first = message.routes[i] if message.routes else None
    if first is not None:
        more[ROUTES] = first
    structure = json.loads(options.structure) if options.structure else {}
    if begun := structure.pop("begun", 0):
        more[BEGUN] = begun
    more |= of_prompt(options.prompt_logprobs)
    return _sampling(
        message,
        options,
        max_tokens=message.max_tokens,
        seed=None if portable else message.seeds[i],
        extra_args=more or None,
        routed_experts_prompt_start=first or 0,
        skip_reading_prefix_cache=True if first == 0 else None,  # vLLM computes no route of a cached token
        prompt_logprobs=options.prompt_logprobs,
        stop_token_ids=list(message.stop_tokens),
        detokenize=bool(options.stop_texts),
        stop=list(options.stop_texts),
        skip_special_tokens=not options.special,
        structured_outputs=StructuredOutputsParams(**structure) if structure else None,
    )


def replaying(message: Judge) -> SamplingParams:
    """The parameters of the request that replays the claimed tokens. It ends after the last one."""
    noise = {} if message.noise is None else {NOISE: list(message.noise)}
    sampling = _sampling(
        message,
        message.options or Options(),
        max_tokens=len(message.token_ids),
        extra_args={REPLAY: [message.start, list(message.token_ids)]} | noise,
        detokenize=False,
    )
    sampling._all_stop_token_ids = set(message.stop_tokens)  # `min_tokens` excludes them, and none of them ends it
    return sampling


def likeliest(by_token: Any, count: int) -> bytes:
    """The `count` likeliest tokens of one draw, as `Output.top` has them. `by_token`: vLLM's `Logprob` by token id: of
    the likeliest and of the one that was drawn."""
    ranked = sorted((-value.logprob, token) for token, value in by_token.items())[:count]
    pairs = [(token, min(0.0, max(MIN_LOGPROB, -negative))) for negative, token in ranked]
    return b"".join(_PAIR.pack(*pair) for pair in pairs + [(0, MIN_LOGPROB)] * (count - len(pairs)))


def prompt_scores(prompt_logprobs: Any, prompt: tuple[int, ...], count: int) -> bytes:
    """`Output.scores`. `prompt_logprobs`: vLLM's, of all tokens of `prompt`. Raises `ValueError` when it has none."""
    found = list(prompt_logprobs or ())[1:]
    if len(found) != len(prompt) - 1 or any(token not in at for token, at in zip(prompt[1:], found)):  # noqa: B905
        raise ValueError("vLLM did not score the prompt")
    own = [at[token] for token, at in zip(prompt[1:], found)]  # noqa: B905
    pairs = [_PAIR.pack(one.rank, min(0.0, max(MIN_LOGPROB, one.logprob))) for one in own]
    return b"".join(pair + likeliest(at, count) for pair, at in zip(pairs, found))  # noqa: B905


def _sampling(message: Generate | Judge, options: Options, **more: Any) -> SamplingParams:
    sampling = SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        ignore_eos=True,
        logprobs=options.top_logprobs if isinstance(message, Generate) else 0,
        output_kind=RequestOutputKind.DELTA,
        min_tokens=options.min_tokens,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=dict(options.logit_bias) or None,
        allowed_token_ids=list(options.allowed) or None,
        **more,
    )
    if options.banned:  # vLLM makes these of `bad_words`; the gateway has done that already
        sampling._bad_words_token_ids = [list(banned) for banned in options.banned]
    return sampling
