"""Equally long prompts that are continued together, a token at a time, by a plain loop with a KV cache.

A row's random numbers depend on (seed, stream), and its tokens on those and its own logits. So a row gets the same
tokens in any cohort, provided that the machine's matrix kernels sum a row in the same order in every batch that is
padded (`node.engines.rows`, `node.engines.invariance`). Where they do not, only the same rows together give the same
tokens. The rows have equal length, so there is no mask, and no row can change another.

Between any two tokens the weights may become another version. Each token's log-probability is that of the version that
drew it, and its span names that version. The cache of the older version is either computed anew or kept. If it is
computed anew, every token is drawn from its version's own distribution over the whole text before it, and another node
can check that. Keeping it is cheaper and cannot be checked.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from codec.routes import RouteShape
from node.engines.base import Completion, DrawnTokens, Prompt, SamplingParams, Span, Version
from node.engines.constraints import Constraints
from node.engines.judgement import Claim
from node.engines.prompt_scores import pack_scores
from node.engines.routing import RouteLog
from node.engines.rows import Rows, check_tokens, vocabulary_of
from node.engines.sampling import (
    check_options,
    draw,
    draw_portable,
    likeliest,
    log_probabilities,
    margins,
    reshaped,
    scores,
    uniforms,
)
from node.engines.texts import StopText
from node.engines.top_logprobs import pack_top

__all__ = ["Cohort", "judge", "score", "score_prompt"]

LOGITS_BYTES: Final = 1 << 29
"""Of a prompt that is scored, in memory at a time: 900 tokens at a vocabulary of 150,000."""
PLAIN: Final = SamplingParams(1)
"""The distribution that a prompt is scored by."""


class Cohort:
    """Some prompts of equal length. Call `step` until `done`, then `completions`."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        cached: bool = True,
        tokenizer: Any = None,
        shape: RouteShape | None = None,
        texts: Path | None = None,
    ) -> None:
        """`prompts`: of equal length. `cached`: see `node.engines.rows.can_cache`. `tokenizer`: a
        `tokenizers.Tokenizer`, for stop texts. `shape`: of the model's routes, if they are to be recorded.
        `texts`: the file of the tokenizer, for a structure.

        Raises `ValueError` for a token id that the model does not have, for stop texts without a tokenizer, and for
        a structure that cannot be followed.
        """
        self._sampling = sampling
        self._model = model
        device = model.device
        self._rows = Rows(model, [prompt.token_ids for prompt in prompts], cached=cached)
        check_options(sampling, vocabulary_of(model))
        self._prompt = len(prompts[0].token_ids)
        """The length of each prompt."""
        wanted = sampling.extra.structure
        self._prompts = given = [prompt.token_ids for prompt in prompts]
        self._constraints = Constraints(texts, vocabulary_of(model), sampling, given) if wanted else None
        self._routes = None if shape is None else RouteLog(model, shape, len(prompts))
        self._prompt_routes = [prompt.routes for prompt in prompts]
        self._streams = [prompt.stream for prompt in prompts]
        uniform = uniforms(sampling.seed, self._streams, 0 if sampling.extra.portable else sampling.max_tokens)
        self._uniform = torch.from_numpy(uniform).to(device)
        """Empty where the draws are portable."""
        self._stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device)
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        self._top: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of each step, if the sampling asks for it: see `likeliest`."""
        self._lengths = torch.full((len(prompts),), sampling.max_tokens, device=device)
        self._running = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self._texts = [_stop_text(tokenizer, prompt, sampling) for prompt in prompts if sampling.extra.stop_texts]
        """One for each row, if the sampling has stop texts."""
        self._ended_by_text: set[int] = set()
        """Rows that ended with a stop text."""
        self._versions: list[tuple[Version, int]] = []
        """(version, index of the first token that it drew), for each version that drew tokens."""
        self._prompt_scores: dict[tuple[int, ...], bytes] = {}
        """By prompt: `Completion.prompt_scores`."""
        self._told = 0
        """Tokens of each row that `new_tokens` has returned, or passed over because the row had ended."""
        self.done = False

    def refresh(self) -> None:
        """Drop the cache: the next step reads the whole text again, under the weights that are live then."""
        self._rows.refresh()

    @torch.inference_mode()
    def step(self, version: Version) -> None:
        """Draw one more token for each row. `version`: the one that the model holds.

        A row that has ended stays in the batch until all have.
        """
        at = len(self._tokens)
        logits, running = self._read(), self._running.tolist() if self._constraints else []
        if self._constraints is not None:
            logits = self._constraints.masked(logits, running)
        if not at and self._sampling.extra.prompt_logprobs is not None:
            k = self._sampling.extra.prompt_logprobs
            self._prompt_scores = {ids: score_prompt(self._model, ids, k) for ids in set(self._prompts)}
        token, logprob = self._draw(logits, at)
        if self._sampling.extra.top_logprobs:
            self._top.append(likeliest(logits, self._sampling, len(self._streams), self._sampling.extra.top_logprobs))
        if self._constraints is not None:
            self._constraints.add(token.tolist(), running)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, at))
        ended = self._running & torch.isin(token, self._stops)
        for row in self._find_stop_texts(token, ended):
            ended[row] = True
        self._lengths[ended] = at + 1
        self._running &= ~ended
        self._rows.add(token)
        self.done = at + 1 == self._sampling.max_tokens or not bool(self._running.any())

    def _read(self) -> torch.Tensor:
        if self._routes is None:
            return self._rows.read(self._sampling, self._prompt)
        return self._routes.read(lambda: self._rows.read(self._sampling, self._prompt))

    def _draw(self, logits: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._sampling.extra.portable:
            return draw(logits, self._uniform[:, at], self._sampling)
        return draw_portable(logits, self._sampling, [(self._sampling.seed, stream, at) for stream in self._streams])

    def _find_stop_texts(self, token: torch.Tensor, ended: torch.Tensor) -> list[int]:
        """The rows whose stop text this token completes. Rows that a stop token just ended are skipped: a stop token is
        not part of the text."""
        if not self._texts:
            return []
        going = (self._running & ~ended).tolist()
        found = [row for row, value in enumerate(token.tolist()) if going[row] and self._texts[row].add(value)]
        self._ended_by_text.update(found)
        return found

    @property
    def counts(self) -> list[int]:
        """Tokens of each row so far."""
        return self._lengths.clamp(max=len(self._tokens)).tolist()

    def new_tokens(self) -> list[tuple[int, DrawnTokens]]:
        """(row, tokens) of each row that drew some since the last call."""
        begin, end = self._told, len(self._tokens)
        self._told = end
        if begin == end:
            return []
        tokens = torch.stack(self._tokens[begin:], 1).tolist()
        logprobs = torch.stack(self._logprobs[begin:], 1).tolist()
        top = self._likeliest(begin)
        found: list[tuple[int, DrawnTokens]] = []
        for row, count in enumerate(self.counts):
            for span in self._spans(count) if count > begin else ():
                start, stop = max(span.start, begin), span.end
                if start < stop:
                    part = slice(start - begin, stop - begin)
                    drawn = tuple(tokens[row][part]), tuple(logprobs[row][part]), span.version
                    found.append((row, DrawnTokens(start, *drawn, top(row, part))))
        return found

    def _likeliest(self, begin: int) -> Callable[[int, slice], bytes]:
        """(row, which of the steps from `begin` on) -> `Completion.top` of these."""
        if not self._top:
            return lambda row, part: b""
        tokens, values = (torch.stack(parts, 1).cpu().numpy() for parts in zip(*self._top[begin:], strict=True))
        return lambda row, part: pack_top(tokens[row, part], values[row, part])

    def completions(self) -> list[Completion]:
        """One completion for each row. The cohort must be done."""
        tokens, logprobs = torch.stack(self._tokens, 1).cpu(), torch.stack(self._logprobs, 1).cpu()
        top = self._likeliest(0)
        completions = []
        for row, length in enumerate(self._lengths.tolist()):
            ids = tuple(tokens[row, :length].tolist())
            completions.append(
                Completion(
                    token_ids=ids,
                    logprobs=tuple(logprobs[row, :length].tolist()),
                    finish_reason="stop"
                    if row in self._ended_by_text or ids[-1] in self._sampling.stop_tokens
                    else "length",
                    spans=self._spans(length),
                    routes=b"" if self._routes is None else self._routes.completion(row, length),
                    prompt_routes=self._routes.prompt(row) if self._routes and self._prompt_routes[row] else b"",
                    top=top(row, slice(length)),
                    prompt_scores=self._prompt_scores.get(self._prompts[row], b""),
                )
            )
        return completions

    def _spans(self, length: int) -> tuple[Span, ...]:
        starts = [(version, start) for version, start in self._versions if start < length]
        ends = [start for _, start in starts[1:]] + [length]
        return tuple(Span(version, start, end) for (version, start), end in zip(starts, ends, strict=True))


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
) -> tuple[float, ...]:
    """The log-probability that `model` gives each of `token_ids` after `prompt`: float32; see `Completion.logprobs`.

    The text is read in one pass, which rounds otherwise than sampling token by token: differences of 1e-5 (float32) or
    some 1e-2 (bfloat16) mean nothing. -inf for a token that is outside the top-p cut by more than rounding explains.
    Raises `ValueError` for a token id that the model does not have.
    """
    logits, chosen = _read_given(model, prompt, token_ids, sampling)
    return _score_given(logits, chosen, sampling)


@torch.inference_mode()
def score_prompt(model: PreTrainedModel, prompt: Sequence[int], k: int) -> bytes:
    """`Completion.prompt_scores` of `prompt`, with `k` likeliest tokens in the place of each.

    The text is read anew for each part of it whose logits have room in memory. Raises `ValueError` as `score` does.
    """
    rows = max(1, LOGITS_BYTES // (4 * vocabulary_of(model)))
    found: list[tuple[np.ndarray, ...]] = []
    for start in range(1, len(prompt), rows):
        logits, chosen = _read_given(model, prompt[:start], prompt[start : start + rows], PLAIN)
        logprobs = log_probabilities(logits, PLAIN)
        own = logprobs.gather(-1, chosen[:, None])
        top = likeliest(logits, PLAIN, len(logits), k)
        parts = ((logprobs >= own).sum(-1), own[:, 0], *top)
        found.append(tuple(part.cpu().numpy() for part in parts))
    return pack_scores(*(np.concatenate(parts) for parts in zip(*found, strict=True))) if found else b""


@torch.inference_mode()
def judge(model: PreTrainedModel, claim: Claim) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(the scores of the claimed tokens, as `score` gives them; their margins, see `Judgement`)."""
    sampling = claim.sampling
    logits, chosen = _read_given(model, claim.prompt, claim.token_ids, sampling)
    found: tuple[float, ...] = ()
    if sampling.extra.portable:
        found = tuple(margins(logits, chosen, sampling, claim.stream).tolist())
    return _score_given(logits, chosen, sampling), found


def _score_given(logits: torch.Tensor, chosen: torch.Tensor, sampling: SamplingParams) -> tuple[float, ...]:
    found = scores(logits, sampling).gather(-1, chosen[:, None])[:, 0]
    return tuple(found.float().clamp_max(0.0).tolist())  # where one token has all the probability, rounding adds 1e-7


def _read_given(
    model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the logits of each of `token_ids`, after the options' changes, `token_ids`), read in one pass."""
    if sampling.extra.structure:
        raise ValueError("structure: tokens that were drawn by one are not scored")
    ids = torch.tensor([[*prompt, *token_ids]], dtype=torch.int64)
    check_tokens(model, ids)
    kept = len(token_ids) + 1
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept).logits[0, :-1]
    if sampling.extra.reshapes:
        text, start = ids.to(logits.device), len(prompt)
        rows = [
            reshaped(row[None], text[:, :start], tuple(text[:, start : start + i].unbind(1)), sampling)
            for i, row in enumerate(logits)
        ]
        logits = torch.cat(rows)
    return logits, ids[0, len(prompt) :].to(logits.device)


def _stop_text(tokenizer: Any, prompt: Prompt, sampling: SamplingParams) -> StopText:
    if tokenizer is None:
        raise ValueError("stop: the base has no tokenizer.json, and without one no text can be looked for")
    options = sampling.extra
    return StopText(tokenizer, prompt.token_ids, options.stop_texts, special=options.special, least=options.min_tokens)
