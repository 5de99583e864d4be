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
from typing import Any, NamedTuple

import msgspec
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from .messages import Options, Score
from .reshape import BORDER_NATS, keep, reshape

__all__ = ["install", "read", "scoring"]


class _By(NamedTuple):
    """How the tokens were drawn. `prompt`: how many tokens of the text were there before."""

    temperature: float
    top_p: float
    widest_top_p: float
    options: Options | None = None
    stop_tokens: tuple[int, ...] = ()
    prompt: int = 0


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
        extra_args={
            ASK: [message.temperature, message.top_p, message.widest_top_p]
            if message.options is None
            else [
                message.temperature,
                message.top_p,
                message.widest_top_p,
                msgspec.to_builtins(message.options),
                list(message.stop_tokens),
                len(message.prompt),
            ]
        },
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
        PromptLogprobsWorker._swarm_remove = PromptLogprobsWorker.remove_request
        PromptLogprobsWorker._swarm_compute = PromptLogprobsWorker.compute_prompt_logprobs
        PromptLogprobsWorker.add_request = _add_request
        PromptLogprobsWorker.remove_request = _remove_request
        PromptLogprobsWorker.compute_prompt_logprobs = _compute


def _asked(sampling: Any) -> _By | None:
    """What to score a request's text by; None: it is not one of ours."""
    found = ((getattr(sampling, "extra_args", None) or {}) if sampling is not None else {}).get(ASK)
    if found is None:
        return None
    by = _By(float(found[0]), float(found[1]), float(found[2]))
    if len(found) == 3:
        return by
    options = msgspec.convert(found[3], Options)
    return by._replace(options=options, stop_tokens=tuple(found[4]), prompt=int(found[5]))


def _scores(logits: torch.Tensor, by: _By) -> torch.Tensor:
    """As vLLM's sampler makes of logits what it draws from, and tells of it: float32, (rows, vocabulary)."""
    logits = logits.to(torch.float32)
    if by.temperature == 0.0:
        return logits.log_softmax(-1)
    logits = logits / by.temperature
    if by.options is not None and (by.options.min_p or by.options.top_k):
        logits = logits.log_softmax(-1)
        inside = _nucleus(keep(logits, by.options), by.top_p)
        return _nucleus(keep(logits, by.options, BORDER_NATS), by.widest_top_p) - inside.logsumexp(-1, keepdim=True)
    if by.top_p == 1.0:
        return logits.log_softmax(-1)
    return _nucleus(logits, by.widest_top_p) - _nucleus(logits, by.top_p).logsumexp(-1, keepdim=True)


def _reshaped(logits: torch.Tensor, ids: torch.Tensor, first: int, by: _By) -> torch.Tensor:
    """Logits as the sampler's options change them. `logits[i]`: of the token after `ids[first + i]`."""
    if by.options is None:
        return logits
    ids = ids.to(logits.device)
    known = [token for token in by.stop_tokens if token < logits.shape[-1]]
    rows = []
    for i, row in enumerate(logits):
        end = first + i + 1
        drawn = end >= by.prompt  # else nobody asks how likely it was
        text = ids[None, by.prompt : end]
        rows.append(reshape(row[None], ids[None, : by.prompt], text, by.options, known) if drawn else row[None].float())
    return torch.cat(rows)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p == 1.0:
        return logits
    wanted = torch.full((len(logits),), top_p, dtype=torch.float32, device=logits.device)
    return apply_top_k_top_p(logits.clone(), None, wanted)


def _fill(
    told: torch.Tensor,
    ids: torch.Tensor,
    by: _By,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    first: int,
    row: int,
    count: int,
) -> bool:
    """Score what a step read: `count` tokens from `first` on, whose states begin at `row`. Is the text read to its end?

    `told[i]`, float32: of token i + 1, given those before it.
    """
    end = min(first + count, len(ids) - 1)
    for at in range(first, end, _ROWS):
        to = min(at + _ROWS, end)
        logits = logits_fn(states[row + at - first : row + to - first])
        told[at:to] = _scores(_reshaped(logits, ids, at, by), by).gather(
            -1, ids[at + 1 : to + 1, None].to(logits.device)
        )[:, 0]
    return first + count >= len(ids)


def _told(ids: torch.Tensor, scores: torch.Tensor) -> Any:
    """As vLLM hands on a prompt's log-probabilities, with our mark for ranks."""
    ranks = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
    return LogprobsTensors(ids[1:, None].to(torch.int32), scores[:, None], ranks)


# ---------------------------------------------------------------- the runner of CPUs, and of GPUs without Triton


def _prompt_logprobs(runner: Any, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
    ours = {name: by for name in runner.num_prompt_logprobs if (by := _asked(runner.requests[name].sampling_params))}
    kept = {name: runner.num_prompt_logprobs.pop(name) for name in ours}
    found = _original_v1(runner, hidden_states, scheduled)
    for name, by in ours.items():
        request = runner.requests[name]
        if name in scheduled and _score(runner, request, hidden_states, name, scheduled[name], by, found):
            request.in_progress_prompt_logprobs_cpu = None
        else:
            runner.num_prompt_logprobs[name] = kept[name]
    return found


def _score(
    runner: Any, request: Any, states: torch.Tensor, name: str, count: int, by: _By, found: dict[str, Any]
) -> bool:
    """Whether the request is done with; its scores are in `found` then, unless they could not be had."""
    try:
        ids = torch.tensor(request.prompt_token_ids, dtype=torch.int64, device="cpu")
        if request.in_progress_prompt_logprobs_cpu is None:
            request.in_progress_prompt_logprobs_cpu = torch.empty(len(ids) - 1, dtype=torch.float32, device="cpu")
        told = request.in_progress_prompt_logprobs_cpu
        row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        if not _fill(told, ids, by, runner.model.compute_logits, states, request.num_computed_tokens, row, count):
            return False
        found[name] = _told(ids, told)
    except Exception:  # no engine shall end because a check was asked of it
        _log.exception("tokens could not be scored")
    return True


# ---------------------------------------------------------------- the newer runner of GPUs


def _add_request(worker: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
    worker._swarm_add(req_id, req_idx, sampling_params)
    if (by := _asked(sampling_params)) is not None:
        worker.uses_prompt_logprobs[req_idx] = False  # the original has nothing to do with it
        worker.__dict__.setdefault("_swarm_asked", {})[req_id] = [by, None]


def _remove_request(worker: Any, req_id: str) -> None:
    worker._swarm_remove(req_id)
    worker.__dict__.get("_swarm_asked", {}).pop(req_id, None)


def _compute(
    worker: Any,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    input_batch: Any,
    all_token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    prompt_lens: Any,
) -> dict[str, Any]:
    found = worker._swarm_compute(
        logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
    )
    asked = worker.__dict__.get("_swarm_asked", {})
    for i, name in enumerate(input_batch.req_ids):
        if name not in asked:
            continue
        try:
            slot, by = int(input_batch.idx_mapping_np[i]), asked[name][0]
            ids = all_token_ids[slot, : int(prompt_lens[slot])].to(torch.int64)
            if asked[name][1] is None:
                asked[name][1] = torch.empty(len(ids) - 1, dtype=torch.float32, device=hidden_states.device)
            first, row = int(input_batch.num_computed_prefill_tokens_np[i]), int(input_batch.query_start_loc_np[i])
            count = int(input_batch.num_scheduled_tokens[i])
            if _fill(asked[name][1], ids, by, logits_fn, hidden_states, first, row, count):
                found[name] = _told(ids, asked.pop(name)[1])
        except Exception:  # no engine shall end because a check was asked of it
            _log.exception("tokens could not be scored")
            asked.pop(name, None)
    return found
