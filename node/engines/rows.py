"""The texts of a batch's rows, read by the model a token at a time: what drawing and replaying have in common.

Matrix kernels for a few rows, or for the last ones of many, round otherwise than the others, and a row's bits would
then depend on how many rows are beside it. So every batch has a multiple of `ROW_MULTIPLE` rows: the first one is
repeated. Whether a row's bits are then the same in every batch is measured for each model on each machine
(`node.engines.invariance`).
"""

import inspect
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from node.engines.base import SamplingParams
from node.engines.sampling import reshaped

__all__ = ["ROW_MULTIPLE", "UNREADABLE", "Rows", "can_cache", "check_tokens", "read_all", "vocabulary_of"]

ROW_MULTIPLE: Final = 4
"""Every batch has a multiple of so many rows. On CPUs one row alone rounds otherwise in bfloat16, one to three do in
float32, and, with several threads, also the last rows of 5 to 7 and of 9 to 11."""

UNREADABLE: Final = (*(RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError),)
"""What models raise for a text, or a cache, that they cannot read."""

CACHE_PROBE_TOKENS: Final = 8
"""Tokens of the text that `can_cache` tries: a prompt and two steps."""
CACHE_WITHIN: Final = 0.001
"""The largest difference of logits, in their standard deviations, at which a cache counts as correct. Sums in another
order differ by 1e-6, and a cache that the model does not use by 1. Bamba's two ways of computing differ by 0.006 in
transformers 5.23, in float64 too."""
CACHE_WITHIN_HALVES: Final = 0.3
"""The same for 16-bit arithmetic, whose rounding differs by some hundredths."""


class Rows:
    """Some texts of equal length. Call `read`, then `add`, in turn."""

    def __init__(self, model: PreTrainedModel, texts: Sequence[Sequence[int]], *, cached: bool) -> None:
        """`cached`: see `can_cache`; if false, the whole text is read for each token.

        Raises `ValueError` for a token id that the model does not have.
        """
        self._model = model
        self._cached = cached
        ids = torch.tensor([list(text) for text in texts], dtype=torch.int64)
        check_tokens(model, ids)
        self._text = _padded(ids.to(model.device))
        self.refresh()

    def refresh(self) -> None:
        """Drop the cache: the next `read` reads the whole text again, under the weights that are live then."""
        self._past = _Past(self._model) if self._cached else None
        self._unread = self._text

    def read(self, sampling: SamplingParams, prompt: int) -> torch.Tensor:
        """The logits after the texts so far, after the changes of `sampling`'s options: (rows, vocabulary).

        `prompt`: the length of the part of each text that was not drawn. The rows beyond the
        texts are padding.
        """
        unread = self._text if self._past is None else self._unread
        logits = read_all(self._model, unread) if self._past is None else self._past.read(unread)
        if not sampling.extra.reshapes:
            return logits
        return reshaped(logits, self._text[:, :prompt], self._text[:, prompt:].unbind(1), sampling)

    def add(self, tokens: torch.Tensor) -> None:
        """Append one token to each text: int64, (texts,)."""
        self._unread = _padded(tokens[:, None])
        self._text = torch.cat([self._text, self._unread], 1)


def _padded(ids: torch.Tensor) -> torch.Tensor:
    """`ids`, and the first row as often as it takes until there is a multiple of `ROW_MULTIPLE`."""
    return torch.cat([ids, ids[:1].expand(-len(ids) % ROW_MULTIPLE, -1)])


class _Past:
    """A model's cache of the text so far: keys and values, states, or both."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._given: dict[str, Any] = {_cache_argument(model): DynamicCache(config=model.config)}

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Read `ids` after the text so far. Returns the logits after the last of them: (rows, vocabulary)."""
        return self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **self._given).logits[:, -1]


def read_all(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The logits after each row of `ids`, read without a cache: (rows, vocabulary)."""
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]


def _cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache argument of the model's `forward`."""
    known = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in known and "past_key_values" not in known else "past_key_values"


@torch.inference_mode()
def can_cache(model: PreTrainedModel) -> bool:
    """Whether this model gives the same logits for a short text read in parts, with a cache, as for the text at once.

    Some architectures need another kind of cache. Others accept ours and do not use it: they would draw from the last
    token alone, without any error.
    """
    vocabulary = vocabulary_of(model)
    ids = (torch.arange(CACHE_PROBE_TOKENS, device=model.device) * 7 + 3).remainder(vocabulary)[None]
    try:
        past = _Past(model)
        past.read(ids[:, :-2])
        past.read(ids[:, -2:-1])
        found = past.read(ids[:, -1:]).float()
    except UNREADABLE:
        return False
    wanted = read_all(model, ids).float()
    most = wanted.std() * (CACHE_WITHIN if model.dtype == torch.float32 else CACHE_WITHIN_HALVES)
    return bool((found - wanted).abs().max() <= most)


def check_tokens(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raises `ValueError` for a token id that `model` does not have."""
    vocabulary = vocabulary_of(model)
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"prompt: a token id outside 0 to {vocabulary - 1}")


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of tokens in `model`'s vocabulary."""
    return len(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)
