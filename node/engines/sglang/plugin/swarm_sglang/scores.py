"""The log-probabilities of given tokens: one pass over a text, with SGLang's own log-probabilities of a prompt.

A request to score is known by its id (`rids`). Its tokens are scored as another node drew them: after temperature and
top-p. A token just outside the nucleus is scored as if it were inside, because rounding may have moved the border.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

import inspect
from typing import Any

import torch

from .cuts import least_inside
from .rids import widest

__all__ = ["hook", "score_rows"]


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    metadata = "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch"
    prompts = "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward"
    HookRegistry.register(metadata, _describe, HookType.AFTER)
    HookRegistry.register(prompts, _score, HookType.AROUND)


def _describe(metadata: Any, _: Any, batch: Any) -> Any:
    """Note by which cuts each sequence of the batch is scored; None: it is not."""
    cuts: list[tuple[float, float, float] | None] = []
    if metadata.extend_return_logprob and any(widest(rid) is not None for rid in batch.rids):
        info = batch.sampling_info
        for rid, temperature, top_p in zip(batch.rids, info.temperatures.view(-1).tolist(), info.top_ps.tolist()):  # noqa: B905 - Python 3.10
            wide = widest(rid)
            cuts.append(None if wide is None else (temperature, top_p, wide))
    metadata.swarm_cuts = cuts
    return metadata


def _score(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the logits of the rows that are scored, and replace SGLang's numbers of these rows by the scores."""
    bound = inspect.signature(original).bind(processor, *args, **kwargs)
    given = bound.arguments
    metadata = given["logits_metadata"]
    if not any(getattr(metadata, "swarm_cuts", ())):
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
    tokens = metadata.extend_input_logprob_token_ids_gpu
    scores = result.token_logprobs.float()
    for sequence, by in enumerate(metadata.swarm_cuts):
        if by is not None and (mine := [i for i, owner in enumerate(owners) if owner == sequence]):
            scores[mine] = score_rows(logits[mine], tokens[mine], *by)
    result.token_logprobs = scores
    return result, sampled


def score_rows(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, top_p: float, widest_top_p: float
) -> torch.Tensor:
    """The log-probability of each row's token: float32, (rows,). `logits`: float32, (rows, vocabulary).

    A token outside the nucleus of `widest_top_p` gets -inf.
    """
    logprobs = (logits / temperature).log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None].long())[:, 0]
    if top_p == 1.0:
        return own
    probs = logprobs.exp()
    inside = torch.where(probs >= least_inside(probs, top_p), probs, 0.0).sum(-1)
    near = own.exp() >= least_inside(probs, widest_top_p)[:, 0]
    return torch.where(near, own - inside.log(), -torch.inf)
