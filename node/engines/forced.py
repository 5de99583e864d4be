"""Replays: claimed tokens judged by the computation that draws tokens, in which they take the place of drawn ones.

The text before a claim's start is read at once, then one token after the other, as `node.engines.cohort` does at the
beginning of a flight and after a commit. Where a row's bits do not depend on its batch (`node.engines.invariance`), the
scores are bit for bit the log-probabilities of the engine that drew the tokens, if it is of the same arithmetic class
and held the same weights. Its tokens win by exactly 0: no border has any slack.
"""

from collections.abc import Sequence

import msgspec
import torch
from transformers import PreTrainedModel

from node.engines.judgement import Claim
from node.engines.rows import UNREADABLE, Rows, check_tokens, vocabulary_of
from node.engines.sampling import check_options, replayed

__all__ = ["Found", "replay"]

Found = tuple[tuple[float, ...], tuple[float, ...]]
"""(scores, margins) of a claim's tokens from its start on; see `node.engines.judgement.Judgement`."""


def replay(model: PreTrainedModel, claims: Sequence[Claim], *, cached: bool) -> list[Found | Exception]:
    """What a replay finds of each claim, or the error for which there is nothing.

    Claims share a batch where they read texts of one length and were drawn from distributions of one kind. A claim that
    the model cannot read costs no other claim its answer.
    """
    out: list[Found | Exception] = [ValueError("claim: not read")] * len(claims)
    batches: dict[tuple[int, int, bytes], list[int]] = {}
    for i, claim in enumerate(claims):
        try:
            check_tokens(model, torch.tensor([*claim.prompt, *claim.token_ids]))
            check_options(claim.sampling, vocabulary_of(model))
        except ValueError as error:
            out[i] = error
        else:
            batches.setdefault(_batch_of(claim), []).append(i)
    for members in batches.values():
        for i, found in zip(members, _apart(model, [claims[i] for i in members], cached), strict=True):
            out[i] = found
    return out


def _batch_of(claim: Claim) -> tuple[int, int, bytes]:
    """Claims with the same value can share a batch: each row has a seed, a stream and a start of its own."""
    sampling = msgspec.structs.replace(claim.sampling, seed=0)
    prompt = len(claim.prompt) if sampling.extra.reshapes else 0  # then drawn tokens count, and not those before them
    return len(claim.prompt) + claim.start, prompt, msgspec.msgpack.encode(sampling)


def _apart(model: PreTrainedModel, claims: list[Claim], cached: bool) -> list[Found | Exception]:
    """The claims together; if that fails, each alone."""
    try:
        return [*_together(model, claims, cached)]
    except UNREADABLE as error:
        if len(claims) == 1:
            return [error]
    return [found for claim in claims for found in _apart(model, [claim], cached)]


@torch.inference_mode()
def _together(model: PreTrainedModel, claims: list[Claim], cached: bool) -> list[Found]:
    sampling, prompt = claims[0].sampling, len(claims[0].prompt)
    rows = Rows(model, [(*claim.prompt, *claim.token_ids[: claim.start]) for claim in claims], cached=cached)
    most = max(claim.tokens for claim in claims)
    given = [claim.token_ids[claim.start :] for claim in claims]
    given = [[*tokens, *[tokens[-1]] * (most - len(tokens))] for tokens in given]  # what follows an end changes no row
    tokens = torch.tensor(given, dtype=torch.int64).to(model.device)
    scores, margins = [], []
    for i in range(most):
        places = [(claim.sampling.seed, claim.stream, claim.start + i) for claim in claims]
        score, margin = replayed(rows.read(sampling, prompt), tokens[:, i], sampling, places)
        scores.append(score)
        margins.append(margin)
        rows.add(tokens[:, i])
    found = zip(torch.stack(scores, 1).tolist(), torch.stack(margins, 1).tolist(), claims, strict=True)
    portable = sampling.extra.portable
    return [(tuple(s[: c.tokens]), tuple(m[: c.tokens]) if portable else ()) for s, m, c in found]
