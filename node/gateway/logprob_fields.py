"""Reads the fields of a request that ask for log-probabilities: `logprobs`, also with `echo`, `top_logprobs` and
`prompt_logprobs`. Pure."""

from typing import Any, NamedTuple

from node.engines.base import MAX_TOP
from node.gateway.parameters import BadRequest

__all__ = ["Logprobs", "of_chat", "of_completion", "of_prompt", "of_tokens"]


class Logprobs(NamedTuple):
    """Whether those of the sampled tokens are wanted, those of how many of the likeliest ones, and the field that says
    so. `echoed`: see `ParsedRequest.echo_logprobs`."""

    sampled: bool
    top: int
    field: str
    echoed: int | None = None


def of_completion(body: Any, *, prompt_only: bool) -> Logprobs:
    """Of /v1/completions. `prompt_only`: no tokens are wanted but the prompt's. Raises `BadRequest`."""
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP:
        raise BadRequest(f"logprobs: 0 to {MAX_TOP}.", "logprobs")
    likeliest = body.logprobs == 1 and body.temperature == 0  # the sampled token is the likeliest one
    top = 0 if likeliest or prompt_only else body.logprobs or 0
    return Logprobs(body.logprobs is not None, top, "logprobs", body.logprobs if body.echo else None)


def of_chat(body: Any) -> Logprobs:
    """Of /v1/chat/completions. Raises `BadRequest`."""
    if not 0 <= (body.top_logprobs or 0) <= MAX_TOP or (body.top_logprobs and not body.logprobs):
        raise BadRequest(f"top_logprobs: 0 to {MAX_TOP}, with logprobs.", "top_logprobs")
    return Logprobs(bool(body.logprobs), body.top_logprobs or 0, "top_logprobs")


def of_tokens(sampling: Any) -> Logprobs:
    """Of /inference/v1/generate. Raises `BadRequest`."""
    if not 0 <= (sampling.logprobs or 0) <= MAX_TOP:
        raise BadRequest(f"sampling_params.logprobs: 0 to {MAX_TOP}.", "sampling_params.logprobs")
    return Logprobs(True, sampling.logprobs if (sampling.logprobs or 0) > 1 else 0, "logprobs")


def of_prompt(body: Any, outer: Any, logprobs: Logprobs) -> int | None:
    """`SamplingOptions.prompt_logprobs`: the larger one of what the request and its echo ask for. `outer`: the body
    with the fields that are not of the sampling. Raises `BadRequest`."""
    wanted = body.prompt_logprobs
    if wanted is not None and not 0 <= wanted <= MAX_TOP:
        raise BadRequest(f"prompt_logprobs: 0 to {MAX_TOP}.", "prompt_logprobs")
    if wanted is not None and getattr(outer, "stream", None):
        why = "a stream has none; it has those of /v1/completions with echo and logprobs."
        raise BadRequest(f"prompt_logprobs: {why}", "prompt_logprobs")
    found = max((each for each in (wanted, logprobs.echoed) if each is not None), default=None)
    if found is not None and body.return_routed_experts:
        name = "echo" if wanted is None else "prompt_logprobs"
        raise BadRequest(f"{name}: no log-probabilities of the prompt together with return_routed_experts.", name)
    return found
