"""Equally long prompts that are continued together, a token at a time, by a plain loop with a KV cache.

A row's random numbers depend on (seed, stream) and its tokens on those and its own logits, so it gets the same tokens
whoever shares its cohort, as far as the machine's matrix kernels sum a row in the same order for every batch size (and
who needs certainty beyond that generates the same rows together). Rows have equal length: no padding, no mask, nothing
that one row could change for another.

Between any two tokens the weights may become another version. Then each token's log-probability is that of the version
that drew it, and its span says which. What was cached under the older weights is either computed anew, so that every
token was drawn from its version's own distribution over the whole text before it (and another can check that), or kept
stale, which is cheaper and cannot be checked.
"""

from collections.abc import Sequence
from typing import cast

import torch
from transformers import DynamicCache, PreTrainedModel

from node.engines.base import Completion, Prompt, SamplingParams, Span, Version
from node.engines.sampling import draw, scores, uniforms

__all__ = ["Cohort", "score"]


class Cohort:
    """`prompts` must be equally long. Call `step` until `done`."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        """Raises `ValueError` for a token id that the model does not have."""
        self._model = model
        self._sampling = sampling
        device = model.device
        ids = torch.tensor([prompt.token_ids for prompt in prompts], dtype=torch.int64)
        check_tokens(model, ids)
        self._prompts = ids.to(device)
        uniform = uniforms(sampling.seed, [prompt.stream for prompt in prompts], sampling.max_tokens)
        self._uniform = torch.from_numpy(uniform).to(device)
        self._stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device)
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []
        self._lengths = torch.full((len(prompts),), sampling.max_tokens, device=device)
        self._running = torch.ones(len(prompts), dtype=torch.bool, device=device)
        self._versions: list[tuple[Version, int]] = []
        """Each version that drew tokens, and the first of those."""
        self.done = False
        self.refresh()

    def refresh(self) -> None:
        """Forget what was computed: the next step reads the whole text again, under the weights that are live then."""
        self._cache = DynamicCache(config=self._model.config)
        self._current = torch.cat([self._prompts, *(token[:, None] for token in self._tokens)], 1)

    @torch.inference_mode()
    def step(self, version: Version) -> None:
        """One more token for each row, drawn from `version`, which is what the model holds.

        A row that met a stop token rides along until all have, because dropping it would change the shape of the batch
        for the others.
        """
        at = len(self._tokens)
        output = self._model(input_ids=self._current, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        token, logprob = draw(output.logits[:, -1], self._uniform[:, at], self._sampling)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, at))
        ended = self._running & torch.isin(token, self._stops)
        self._lengths[ended] = at + 1
        self._running &= ~ended
        self._current = token[:, None]
        self.done = at + 1 == self._sampling.max_tokens or not bool(self._running.any())

    @property
    def counts(self) -> list[int]:
        """Tokens of each row so far."""
        return self._lengths.clamp(max=len(self._tokens)).tolist()

    def completions(self) -> list[Completion]:
        """Of a cohort that is done."""
        tokens, logprobs = torch.stack(self._tokens, 1).cpu(), torch.stack(self._logprobs, 1).cpu()
        made = []
        for row, length in enumerate(self._lengths.tolist()):
            ids = tuple(tokens[row, :length].tolist())
            made.append(
                Completion(
                    token_ids=ids,
                    logprobs=tuple(logprobs[row, :length].tolist()),
                    finish_reason="stop" if ids[-1] in self._sampling.stop_tokens else "length",
                    spans=self._spans(length),
                )
            )
        return made

    def _spans(self, length: int) -> tuple[Span, ...]:
        starts = [(version, start) for version, start in self._versions if start < length]
        ends = [start for _, start in starts[1:]] + [length]
        return tuple(Span(version, start, end) for (version, start), end in zip(starts, ends, strict=True))


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
) -> tuple[float, ...]:
    """The log-probability that `model` gives each of `token_ids` after `prompt`: float32; see `Completion.logprobs`.

    Read in one pass, so its rounding is another than that of sampling token by token: differences of 1e-5 (float32)
    or some 1e-2 (bfloat16) mean nothing. -inf for a token that the top-p cut leaves out by more than rounding. Raises
    `ValueError` for a token id that the model does not have.
    """
    ids = torch.tensor([[*prompt, *token_ids]], dtype=torch.int64)
    check_tokens(model, ids)
    kept = len(token_ids) + 1
    logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept).logits[0, :-1]
    chosen = ids[0, len(prompt) :].to(logits.device)
    found = scores(logits, sampling).gather(-1, chosen[:, None])[:, 0]
    return tuple(found.float().cpu().tolist())


def check_tokens(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raises `ValueError` for a token id that `model` does not have."""
    vocabulary = len(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"prompt: a token id outside 0 to {vocabulary - 1}")
