"""How likely given tokens are: what spot checks of others' rollouts ask of an engine.

A request with `prompt_logprobs` reads the text in one pass, past the prefix cache. vLLM then tells each token's
log-probability at temperature 1 over the whole vocabulary, whatever was asked; a rollout tells that of the distribution
it was drawn from. `install` gives a worker process's model runners the missing piece, for requests that carry `ASK` and
for no others. What it computed has the rank 0, which no token has: so an answer without it cannot be taken for one.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in another environment.

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from .messages import Score

__all__ = ["install", "read", "scoring"]

_By = tuple[float, float, float]
"""Temperature, top-p, widest top-p."""

ASK = "swarm_score"
_ROWS = 256
"""Tokens whose logits are held at a time: 150 MB at a vocabulary of 150,000."""

_log = logging.getLogger(__name__)
_original_v1 = GPUModelRunner._get_prompt_logprobs_dict


def scoring(message: Score) -> SamplingParams:
    """What to ask of vLLM for the prompt's tokens to be scored; it draws one more, which says the version."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={ASK: [message.temperature, message.top_p, message.widest_top_p]},
    )


def read(prompt_logprobs: Any, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """The scores of the prompt's last tokens, `token_ids`. Raises `ValueError` when they are vLLM's own."""
    told = list(prompt_logprobs or ())[-len(token_ids) :]
    if len(told) != len(token_ids) or any(at is None or token not in at for at, token in zip(told, token_ids)):  # noqa: B905
        raise ValueError("vLLM did not score the tokens")
    if any(at[token].rank != 0 for at, token in zip(told, token_ids)):  # noqa: B905
        raise ValueError("vLLM's model runner is one that cannot score by another's temperature")
    return tuple(min(0.0, at[token].logprob) for at, token in zip(told, token_ids))  # noqa: B905


def install() -> None:
    """In each process that may hold a model runner. Loading this twice changes nothing."""
    GPUModelRunner._get_prompt_logprobs_dict = _prompt_logprobs
    try:
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    except ImportError:  # a vLLM without the newer runner, or a machine without what it needs
        return
    if not hasattr(PromptLogprobsWorker, "_swarm_add"):
        PromptLogprobsWorker._swarm_add = PromptLogprobsWorker.add_request
        PromptLogprobsWorker._swarm_compute = PromptLogprobsWorker.compute_prompt_logprobs
        PromptLogprobsWorker.add_request = _add_request
        PromptLogprobsWorker.compute_prompt_logprobs = _compute


def _asked(sampling: Any) -> _By | None:
    """What to score a request's text by; None: it is not one of ours."""
    found = ((getattr(sampling, "extra_args", None) or {}) if sampling is not None else {}).get(ASK)
    return None if found is None else (float(found[0]), float(found[1]), float(found[2]))


def _scores(logits: torch.Tensor, temperature: float, top_p: float, widest_top_p: float) -> torch.Tensor:
    """As vLLM's sampler makes of logits what it draws from, and tells of it: float32, (rows, vocabulary)."""
    logits = logits.to(torch.float32)
    if temperature == 0.0:
        return logits.log_softmax(-1)
    logits = logits / temperature
    if top_p == 1.0:
        return logits.log_softmax(-1)
    return _nucleus(logits, widest_top_p) - _nucleus(logits, top_p).logsumexp(-1, keepdim=True)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    return apply_top_k_top_p(logits.clone(), None, torch.full((len(logits),), top_p, device=logits.device))


# ---------------------------------------------------------------- the runner of CPUs, and of GPUs without Triton


def _prompt_logprobs(runner: Any, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
    ours = {name: by for name in runner.num_prompt_logprobs if (by := _asked(runner.requests[name].sampling_params))}
    kept = {name: runner.num_prompt_logprobs.pop(name) for name in ours}
    found = _original_v1(runner, hidden_states, scheduled)
    for name, by in ours.items():
        runner.num_prompt_logprobs[name] = kept[name]
        if name in scheduled and (done := _score(runner, hidden_states, name, scheduled[name], by)) is not None:
            found[name] = done
            del runner.num_prompt_logprobs[name]
    return found


def _score(runner: Any, hidden_states: torch.Tensor, name: str, count: int, by: _By) -> Any:
    """Score what this step read of a request's text; all of it, once the last is read."""
    request = runner.requests[name]
    ids = torch.tensor(request.prompt_token_ids, dtype=torch.int64)
    told = request.in_progress_prompt_logprobs_cpu
    if told is None:
        told = request.in_progress_prompt_logprobs_cpu = LogprobsTensors.empty_cpu(len(ids) - 1, 1)
        told.logprob_token_ids[:, 0] = ids[1:]
        told.selected_token_ranks.zero_()
    first = request.num_computed_tokens
    end = min(first + count, len(ids) - 1)
    row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]]) - first
    for at in range(first, end, _ROWS):
        to = min(at + _ROWS, end)
        logits = runner.model.compute_logits(hidden_states[row + at : row + to])
        scores = _scores(logits, *by).gather(-1, ids[at + 1 : to + 1, None].to(logits.device))
        told.logprobs[at:to] = scores.cpu()
    if first + count < len(ids):
        return None
    request.in_progress_prompt_logprobs_cpu = None
    return told


# ---------------------------------------------------------------- the newer runner of GPUs


def _add_request(worker: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
    worker._swarm_add(req_id, req_idx, sampling_params)
    if (by := _asked(sampling_params)) is not None:
        asked = worker.__dict__.setdefault("_swarm_asked", {})
        for name in [name for name in asked if name not in worker.in_progress_prompt_logprobs]:
            del asked[name]
        asked[req_id] = by


def _compute(
    worker: Any, logits_fn: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, batch: Any, *more: Any
) -> dict[str, Any]:
    """Hand the original, which scores the whole batch in pieces, logits that are what our requests were drawn from."""
    asked = worker.__dict__.get("_swarm_asked", {})
    rows = [
        (int(batch.query_start_loc_np[i]), int(batch.query_start_loc_np[i + 1]), asked[name])
        for i, name in enumerate(batch.req_ids)
        if name in asked
    ]
    if not rows:
        return worker._swarm_compute(logits_fn, states, batch, *more)
    at = 0

    def processed(some: torch.Tensor) -> torch.Tensor:
        nonlocal at
        logits = logits_fn(some).to(torch.float32)
        for first, end, by in rows:
            lo, hi = max(first - at, 0), min(end - at, len(logits))
            if lo < hi:
                logits[lo:hi] = _scores(logits[lo:hi], *by)
        at += len(logits)
        return logits

    found = worker._swarm_compute(processed, states, batch, *more)
    for name in asked:
        if name in found:
            found[name].selected_token_ranks.zero_()
    return found
