"""The log-probabilities of given tokens, and the margins of portable draws: one pass over a text.

SGLang tells the log-probabilities of a prompt; for requests that carry `Asked.scoring` they are replaced by those of
the distribution that the tokens were drawn from. A token just outside a border is scored as if it were inside, because
rounding may have moved the border.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

import inspect
import math
from typing import Any

import torch
from swarm_vllm.margins import MOST_MARGIN, margins
from swarm_vllm.messages import Options
from swarm_vllm.noise import places
from swarm_vllm.reshape import BORDER_NATS, keep, reshape

from .asked import MARK, Asked, Scoring
from .cuts import nucleus
from .running import as_ids, asked_of, begun_otherwise, options_of, requests

__all__ = ["OTHERWISE", "hook", "margin_rows", "most_margin", "score_rows"]

OTHERWISE = 2.0 * MARK + MOST_MARGIN
"""In the place of a margin: some of the text was read under other weights than the live ones."""
_LEAST_MARGIN = 1e-6
"""Nats by which a token that would not be drawn loses if it is tied with the winner. float32 keeps it beside `MARK`."""
_ROWS = 256
"""Tokens that are scored at a time."""
_PLAIN = Options()


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    metadata = "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch"
    prompts = "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward"
    HookRegistry.register(metadata, _describe, HookType.AFTER)
    HookRegistry.register(prompts, _score, HookType.AROUND)


def _describe(metadata: Any, _: Any, batch: Any) -> Any:
    """Note which sequences of the batch are scored, and where in the text the first row of each is."""
    found: list[tuple[Any, int] | None] = []
    if metadata.extend_return_logprob:
        for i, request in enumerate(requests(len(batch.rids))):
            asked = asked_of(request)
            first = batch.extend_prefix_lens_cpu[i] + batch.extend_logprob_start_lens_cpu[i]
            found.append(None if asked is None or asked.scoring is None else (request, int(first)))
    metadata.swarm_scored = found
    return metadata


def _score(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the logits of the rows that are scored, and replace SGLang's numbers of these rows by the scores."""
    bound = inspect.signature(original).bind(processor, *args, **kwargs)
    given = bound.arguments
    metadata = given["logits_metadata"]
    if not any(getattr(metadata, "swarm_scored", ())):
        return original(processor, *args, **kwargs)
    rows: list[torch.Tensor] = []
    logits_of = given["get_logits_fn"]

    def keeping(*a: Any, **k: Any) -> torch.Tensor:
        logits = logits_of(*a, **k)
        rows.append(logits.float())
        return logits

    given["get_logits_fn"] = keeping
    result, sampled = original(*bound.args, **bound.kwargs)
    logits = torch.cat(rows)[given["input_logprob_indices"]]
    owners = [given["token_to_seq_idx"][i] for i in metadata.input_logprob_indices_cpu]
    scores = result.token_logprobs.float()
    for sequence, found in enumerate(metadata.swarm_scored):
        if found is not None and (mine := [i for i, owner in enumerate(owners) if owner == sequence]):
            own, lost = _of_request(logits[mine], *found)
            scores[mine] = own
            result.top_logprobs_val[sequence] = [[one] for one in lost.tolist()]
            result.top_logprobs_idx[sequence] = [[0] for _ in mine]
    result.token_logprobs = scores
    return result, sampled


def _of_request(logits: torch.Tensor, request: Any, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, margins with `MARK`) of the tokens after each row: float32, (rows,). `first`: the first row's place.

    The number after the last token of the text means nothing, nor do those of the prompt.
    """
    asked, options = asked_of(request), options_of(request) or _PLAIN
    assert asked is not None
    assert asked.scoring is not None
    ids = torch.tensor([*request.origin_input_ids, 0], dtype=torch.int64, device=logits.device)
    scores, lost = torch.empty(len(logits)), torch.zeros(len(logits))
    for at in range(0, len(logits), _ROWS):
        part = slice(at, min(at + _ROWS, len(logits)))
        claimed = ids[first + part.start + 1 : first + part.stop + 1]
        some = _reshaped(logits[part], ids[:-1], first + at, asked, options)
        scores[part] = score_rows(some, claimed, asked.scoring, options).cpu()
        if asked.noise is not None:
            lost[part] = margin_rows(some, claimed, first + at + 1 - asked.prompt, asked, options).float().cpu()
    if begun_otherwise(request):
        return scores, torch.full_like(lost, OTHERWISE)
    return scores, lost + MARK


def _reshaped(logits: torch.Tensor, ids: torch.Tensor, first: int, asked: Asked, options: Options) -> torch.Tensor:
    """`logits` after the changes of the sampling options. `logits[i]`: of the token after `ids[first + i]`."""
    if options == _PLAIN:
        return logits
    before, rows = as_ids(ids[: asked.prompt].tolist(), logits.device), []
    for i, row in enumerate(logits):
        end = first + i + 1
        if end < asked.prompt:  # a token of the prompt, which is not scored
            rows.append(row[None])
            continue
        rows.append(reshape(row[None], before, ids[None, asked.prompt : end], options, list(asked.stops)))
    return torch.cat(rows)


def score_rows(logits: torch.Tensor, tokens: torch.Tensor, by: Scoring, options: Options = _PLAIN) -> torch.Tensor:
    """The log-probability of each row's token: float32, (rows,). `logits`: float32, (rows, vocabulary), reshaped.

    A token that no rounding would have let be drawn gets -inf.
    """
    place = tokens[:, None].long()
    if by.temperature == 0.0:
        return logits.log_softmax(-1).gather(-1, place)[:, 0]
    logprobs = (logits / by.temperature).log_softmax(-1)
    kept = nucleus(keep(logprobs, options), by.top_p)
    if kept is logprobs:
        return logprobs.gather(-1, place)[:, 0]
    wide = nucleus(keep(logprobs, options, BORDER_NATS), by.widest_top_p)
    return wide.gather(-1, place)[:, 0] - kept.logsumexp(-1)


def margin_rows(
    logits: torch.Tensor, tokens: torch.Tensor, number: int, asked: Asked, options: Options = _PLAIN
) -> torch.Tensor:
    """By how many nats each row's token loses against the winner of its portable draw: float64, (rows,).

    `number`: of the first row's token among those that were drawn; below 0: it is one of the prompt, whose margin means
    nothing.
    """
    by, noise = asked.scoring, asked.noise
    assert by is not None
    assert noise is not None
    if by.temperature == 0.0:
        logprobs = logits.log_softmax(-1)
        return margins(logprobs, logprobs, logprobs, tokens, None)
    logprobs = (logits / by.temperature).log_softmax(-1)
    kept = keep(logprobs, options)
    tight, wide = nucleus(kept, by.tightest_top_p), nucleus(kept, by.widest_top_p)
    rows = places((*noise, max(0, number + i)) for i in range(len(logits)))
    return margins(logprobs, tight, wide, tokens, rows.to(logits.device))


def most_margin(lost: float) -> float:
    """The margin of a token that is not the winner, as it is told: above 0, and `MOST_MARGIN` at most."""
    return MOST_MARGIN if math.isnan(lost) else min(MOST_MARGIN, max(_LEAST_MARGIN, lost))
