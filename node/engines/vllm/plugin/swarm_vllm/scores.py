"""The log-probabilities of given tokens: nodes check each other's rollouts by them.

A request with `prompt_logprobs` reads the text in one pass, without the prefix cache. vLLM then returns each token's
log-probability at temperature 1 over the whole vocabulary, for any sampling parameters. A rollout has the
log-probabilities of the distribution that its tokens were drawn from. `install` makes a worker process's model runners
compute those, for requests that carry `ASK` only. It marks them with rank 0, which vLLM never uses, so vLLM's own
numbers cannot be taken for them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

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
    """How the tokens were drawn. `prompt`: the number of prompt tokens at the start of the text."""

    temperature: float
    top_p: float
    widest_top_p: float
    options: Options | None = None
    stop_tokens: tuple[int, ...] = ()
    prompt: int = 0


ASK = "swarm_score"
_ROWS = 256
"""Tokens whose logits are in memory at a time: 150 MB at a vocabulary of 150,000."""

_log = logging.getLogger(__name__)
_original_v1 = GPUModelRunner._get_prompt_logprobs_dict


def scoring(message: Score) -> SamplingParams:
    """The parameters of a request that scores. It also draws one token, which tells the version of the weights."""
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
    last = list(prompt_logprobs or ())[-len(token_ids) :]
    if len(last) != len(token_ids) or any(at is None or token not in at for at, token in zip(last, token_ids)):  # noqa: B905
        raise ValueError("vLLM did not score the tokens")
    if any(at[token].rank != 0 for at, token in zip(last, token_ids)):  # noqa: B905
        raise ValueError("vLLM's model runner cannot score by the sampling parameters of a rollout")
    return tuple(min(0.0, at[token].logprob) for at, token in zip(last, token_ids))  # noqa: B905


def install() -> None:
    """Change the model runners of this process. A second call does nothing."""
    GPUModelRunner._get_prompt_logprobs_dict = _prompt_logprobs
    try:
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    except ImportError:  # this vLLM lacks the newer runner, or this machine lacks what it needs
        return
    if not hasattr(PromptLogprobsWorker, "_swarm_add"):
        PromptLogprobsWorker._swarm_add = PromptLogprobsWorker.add_request
        PromptLogprobsWorker._swarm_remove = PromptLogprobsWorker.remove_request
        PromptLogprobsWorker._swarm_compute = PromptLogprobsWorker.compute_prompt_logprobs
        PromptLogprobsWorker.add_request = _add_request
        PromptLogprobsWorker.remove_request = _remove_request
        PromptLogprobsWorker.compute_prompt_logprobs = _compute


def _asked(sampling: Any) -> _By | None:
    """How to score a request's text; None for a request that does not ask for it."""
    found = ((getattr(sampling, "extra_args", None) or {}) if sampling is not None else {}).get(ASK)
    if found is None:
        return None
    by = _By(float(found[0]), float(found[1]), float(found[2]))
    if len(found) == 3:
        return by
    options = msgspec.convert(found[3], Options)
    return by._replace(options=options, stop_tokens=tuple(found[4]), prompt=int(found[5]))


def _scores(logits: torch.Tensor, by: _By) -> torch.Tensor:
    """The log-probabilities that vLLM's sampler would draw by: float32, (rows, vocabulary).

    A token just outside a border is scored as if it were inside (see `Score` and `BORDER_NATS`).
    """
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
    """`logits` after the changes of the sampling options. `logits[i]`: of the token after `ids[first + i]`."""
    if by.options is None:
        return logits
    ids = ids.to(logits.device)
    known = [token for token in by.stop_tokens if token < logits.shape[-1]]
    rows = []
    for i, row in enumerate(logits):
        end = first + i + 1
        drawn = end >= by.prompt  # tokens of the prompt are not scored
        text = ids[None, by.prompt : end]
        rows.append(reshape(row[None], ids[None, : by.prompt], text, by.options, known) if drawn else row[None].float())
    return torch.cat(rows)


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p == 1.0:
        return logits
    wanted = torch.full((len(logits),), top_p, dtype=torch.float32, device=logits.device)
    return apply_top_k_top_p(logits.clone(), None, wanted)


def _fill(
    out: torch.Tensor,
    ids: torch.Tensor,
    by: _By,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    first: int,
    row: int,
    count: int,
) -> bool:
    """Score the `count` tokens that a step read, from `first` on. Returns whether the text is read to its end.

    `states`: hidden states of the step's batch; those of this text begin at `row`. `out[i]`, float32: the score of
    token i + 1, given the tokens before it.
    """
    end = min(first + count, len(ids) - 1)
    for at in range(first, end, _ROWS):
        to = min(at + _ROWS, end)
        logits = logits_fn(states[row + at - first : row + to - first])
        out[at:to] = _scores(_reshaped(logits, ids, at, by), by).gather(
            -1, ids[at + 1 : to + 1, None].to(logits.device)
        )[:, 0]
    return first + count >= len(ids)


def _as_prompt_logprobs(ids: torch.Tensor, scores: torch.Tensor) -> Any:
    """The scores in the form of vLLM's prompt log-probabilities, with rank 0 as the mark of this module."""
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
    """Score a step of one request. Returns whether it is done; its scores are then in `found`, unless it failed."""
    try:
        ids = torch.tensor(request.prompt_token_ids, dtype=torch.int64, device="cpu")
        if request.in_progress_prompt_logprobs_cpu is None:
            request.in_progress_prompt_logprobs_cpu = torch.empty(len(ids) - 1, dtype=torch.float32, device="cpu")
        out = request.in_progress_prompt_logprobs_cpu
        row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        if not _fill(out, ids, by, runner.model.compute_logits, states, request.num_computed_tokens, row, count):
            return False
        found[name] = _as_prompt_logprobs(ids, out)
    except Exception:  # a failed check must not end the engine
        _log.exception("tokens could not be scored")
    return True


# ---------------------------------------------------------------- the newer runner of GPUs


def _add_request(worker: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
    worker._swarm_add(req_id, req_idx, sampling_params)
    if (by := _asked(sampling_params)) is not None:
        worker.uses_prompt_logprobs[req_idx] = False  # vLLM itself must not score it
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
                found[name] = _as_prompt_logprobs(ids, asked.pop(name)[1])
        except Exception:  # a failed check must not end the engine
            _log.exception("tokens could not be scored")
            asked.pop(name, None)
    return found
