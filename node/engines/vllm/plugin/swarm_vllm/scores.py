"""The log-probabilities of given tokens: nodes check each other's rollouts by them, and clients ask for their prompts'.

A request with `prompt_logprobs` reads the text in one pass, without the prefix cache. vLLM then returns each token's
log-probability at temperature 1 over the whole vocabulary, for any sampling parameters. A rollout has the
log-probabilities of the distribution that its tokens were drawn from. `install` makes a worker process's model runners
compute those, for requests that carry `ASK` only. It marks them with ranks that vLLM never uses, so vLLM's own numbers
cannot be taken for them: 0, or, where the margin of a portable draw was asked for too, a negative one that tells it.

A prompt that is scored for a client (`TOP`) gets vLLM's own numbers, ranks included, in bounded memory: vLLM's runner
of CPUs holds the logits of all tokens of a step. The request draws tokens as any other.
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

from .margins import margins
from .messages import Judge, Options, Score
from .noise import places
from .reshape import BORDER_NATS, keep, reshape

__all__ = ["install", "of_prompt", "read", "read_margins", "scoring"]


class _By(NamedTuple):
    """How the tokens were drawn. `prompt`: the number of prompt tokens at the start of the text.

    `noise`: seed and stream of portable draws; None: no margins. `top`: so many of the likeliest tokens, and the true
    ranks; None: neither.
    """

    temperature: float
    top_p: float
    widest_top_p: float
    options: Options | None = None
    stop_tokens: tuple[int, ...] = ()
    prompt: int = 0
    tightest_top_p: float = 1.0
    noise: tuple[int, int] | None = None
    top: int | None = None


class _Found(NamedTuple):
    """What is computed of all tokens of a text but the first. `numbers`: float32, (2, tokens): scores, and margins or
    ranks. `tokens`, `values`: int64 and float32, (tokens, `_By.top`): the likeliest tokens."""

    numbers: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


ASK = "swarm_score"
MARGINS = "swarm_margins"
"""In `extra_args` beside `ASK`: the tightest top-p, seed and stream."""
TOP = "swarm_top"
"""In `extra_args` beside `ASK`: see `_By.top`."""
_MARGIN_STEPS = 1 << 20
"""A nat, in the units in which a rank tells a margin."""
_ROWS = 256
"""Tokens whose logits are in memory at a time: 150 MB at a vocabulary of 150,000."""

_PLAIN = Options()
_log = logging.getLogger(__name__)
_original_v1 = GPUModelRunner._get_prompt_logprobs_dict


def scoring(message: Score | Judge, **more: Any) -> SamplingParams:
    """The parameters of a request that scores. It also draws one token, which tells the version of the weights.

    `more`: for `extra_args`.
    """
    asked: list[Any] = [message.temperature, message.top_p, message.widest_top_p]
    noise = message.noise if isinstance(message, Judge) else None
    if message.options is not None or noise is not None:
        options = msgspec.to_builtins(message.options or Options())
        asked += [options, list(message.stop_tokens), len(message.prompt)]
    if isinstance(message, Judge) and noise is not None:
        more[MARGINS] = [message.tightest_top_p, *noise]
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={ASK: asked} | more,
    )


def of_prompt(count: int | None) -> dict[str, Any]:
    """For the `extra_args` of a request that draws: score its prompt, with `count` likeliest tokens; None: do not."""
    return {} if count is None else {ASK: [1.0, 1.0, 1.0], TOP: count}


def read(prompt_logprobs: Any, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """The scores of the prompt's last tokens, `token_ids`. Raises `ValueError` when they are vLLM's own."""
    return tuple(min(0.0, at.logprob) for at in _ours(prompt_logprobs, token_ids))


def read_margins(prompt_logprobs: Any, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """The margins of the prompt's last tokens. Raises `ValueError` when there are none."""
    ranks = [at.rank for at in _ours(prompt_logprobs, token_ids)]
    if not all(rank < 0 for rank in ranks):
        raise ValueError("vLLM's model runner did not judge the tokens")
    return tuple((-1 - rank) / _MARGIN_STEPS for rank in ranks)


def _ours(prompt_logprobs: Any, token_ids: tuple[int, ...]) -> list[Any]:
    last = list(prompt_logprobs or ())[-len(token_ids) :]
    if len(last) != len(token_ids) or any(at is None or token not in at for at, token in zip(last, token_ids)):  # noqa: B905
        raise ValueError("vLLM did not score the tokens")
    found = [at[token] for at, token in zip(last, token_ids)]  # noqa: B905
    if any(at.rank > 0 for at in found):
        raise ValueError("vLLM's model runner cannot score by the sampling parameters of a rollout")
    return found


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
    """How to score a request's text; None for a request that does not ask for it, or does so wrongly: a user's own."""
    extra = (getattr(sampling, "extra_args", None) or {}) if sampling is not None else {}
    if (found := extra.get(ASK)) is None:
        return None
    try:
        by = _By(float(found[0]), float(found[1]), float(found[2]), top=extra.get(TOP))
        if len(found) == 3:
            return by
        options = msgspec.convert(found[3], Options)
        by = by._replace(options=options, stop_tokens=tuple(found[4]), prompt=int(found[5]))
        if (judged := extra.get(MARGINS)) is None:
            return by
        return by._replace(tightest_top_p=float(judged[0]), noise=(int(judged[1]), int(judged[2])))
    except (ValueError, TypeError, KeyError, IndexError, msgspec.ValidationError):
        return None


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


def _margins(logits: torch.Tensor, claimed: torch.Tensor, first: int, by: _By) -> torch.Tensor:
    """The margin of each claimed token: float64, (rows,). `logits[i]`: of the token after token `first + i`.

    The number of a token of the prompt means nothing.
    """
    assert by.noise is not None
    logits = logits.to(torch.float32)
    if by.temperature == 0.0:
        logprobs = logits.log_softmax(-1)
        return margins(logprobs, logprobs, logprobs, claimed, None)
    logprobs = (logits / by.temperature).log_softmax(-1)
    inside = logprobs if by.options is None else keep(logprobs, by.options)
    tight, wide = _nucleus(inside, by.tightest_top_p), _nucleus(inside, by.widest_top_p)
    seed, stream = by.noise
    rows = places((seed, stream, max(0, first + i + 1 - by.prompt)) for i in range(len(logits)))
    return margins(logprobs, tight, wide, claimed, rows.to(logits.device))


def _reshaped(logits: torch.Tensor, ids: torch.Tensor, first: int, by: _By) -> torch.Tensor:
    """`logits` after the changes of the sampling options. `logits[i]`: of the token after `ids[first + i]`."""
    if by.options is None or by.options == _PLAIN:
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
    out: _Found,
    ids: torch.Tensor,
    by: _By,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    first: int,
    row: int,
    count: int,
) -> bool:
    """Score the `count` tokens that a step read, from `first` on. Returns whether the text is read to its end.

    `states`: hidden states of the step's batch; those of this text begin at `row`. Row i of `out` is of token i + 1,
    given the tokens before it.
    """
    end = min(first + count, len(ids) - 1)
    for at in range(first, end, _ROWS):
        to = min(at + _ROWS, end)
        logits = logits_fn(states[row + at - first : row + to - first])
        logits, claimed = _reshaped(logits, ids, at, by), ids[at + 1 : to + 1].to(logits.device)
        logprobs = _scores(logits, by)
        own = logprobs.gather(-1, claimed[:, None])
        out.numbers[0, at:to] = own[:, 0]
        if by.noise is not None:
            out.numbers[1, at:to] = _margins(logits, claimed, at, by)
        elif by.top is not None:
            out.numbers[1, at:to] = (logprobs >= own).sum(-1)
            out.values[at:to], out.tokens[at:to] = logprobs.topk(by.top, -1)
    return first + count >= len(ids)


def _as_prompt_logprobs(ids: torch.Tensor, out: _Found, by: _By) -> Any:
    """What `_fill` wrote, in the form of vLLM's prompt log-probabilities, with true ranks or this module's mark."""
    scores, ranks = out.numbers
    if by.top is None:
        ranks = torch.zeros_like(ranks) if by.noise is None else -1 - torch.round(ranks * _MARGIN_STEPS)
    tokens = torch.cat([ids[1:, None].to(out.tokens.device), out.tokens], -1)
    return LogprobsTensors(tokens.to(torch.int32), torch.cat([scores[:, None], out.values], -1), ranks.to(torch.int32))


def _empty(ids: torch.Tensor, device: Any, by: _By) -> _Found:
    """For `_fill`."""
    count, top = len(ids) - 1, by.top or 0
    return _Found(
        torch.empty((2, count), dtype=torch.float32, device=device),
        torch.empty((count, top), dtype=torch.int64, device=device),
        torch.empty((count, top), dtype=torch.float32, device=device),
    )


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
            request.in_progress_prompt_logprobs_cpu = _empty(ids, "cpu", by)
        out = request.in_progress_prompt_logprobs_cpu
        row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        if not _fill(out, ids, by, runner.model.compute_logits, states, request.num_computed_tokens, row, count):
            return False
        found[name] = _as_prompt_logprobs(ids, out, by)
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
            if int(prompt_lens[slot]) < int(input_batch.prefill_len_np[i]):  # preempted after it was scored
                asked.pop(name)
                continue
            ids = all_token_ids[slot, : int(prompt_lens[slot])].to(torch.int64)
            if asked[name][1] is None:
                asked[name][1] = _empty(ids, hidden_states.device, by)
            first, row = int(input_batch.num_computed_prefill_tokens_np[i]), int(input_batch.query_start_loc_np[i])
            count = int(input_batch.num_scheduled_tokens[i])
            if _fill(asked[name][1], ids, by, logits_fn, hidden_states, first, row, count):
                found[name] = _as_prompt_logprobs(ids, asked.pop(name)[1], by)
        except Exception:  # a failed check must not end the engine
            _log.exception("tokens could not be scored")
            asked.pop(name, None)
    return found
