"""The one seam between a node and whatever generates its tokens.

An engine is downstream of the replica: it is handed patches (tensor, flat index, new bits), which are idempotent, and
proves on demand what its live parameters hold. Nothing here knows torch, so a node can hold the other end of an engine
that lives in a process of its own.

Calls are synchronous. `stage` may run in another thread while `generate` runs, because it touches no live parameter;
everything else is called from one thread, so a commit falls between two batches, or between two steps of an engine
that can stop there (`SteppedEngine`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from codec.errors import SwarmError
from codec.layout import Layout

__all__ = [
    "ABILITIES",
    "BASE_VERSION",
    "EXACT_SEED",
    "OPTIONS",
    "SCORE_OPTIONS",
    "Completion",
    "Engine",
    "EngineError",
    "Patch",
    "Prompt",
    "SamplingOptions",
    "SamplingParams",
    "Scorer",
    "Span",
    "SteppedEngine",
    "Version",
    "needs",
    "scoring_needs",
]

Version = tuple[int, int]
"""(epoch, v): ordered as the design orders versions."""

BASE_VERSION: Final[Version] = (0, 0)

Patch = Iterable[tuple[str, NDArray[np.int64], NDArray[np.unsignedinteger]]]
"""(checkpoint tensor name, sorted flat indices, new bits): absolute bits, so applying one twice does no harm.

The bits are unsigned integers as wide as an element of the tensor (uint16 for bf16). The arrays need to live only until
the iterator moves on.
"""

MAX_SEED: Final = 2**64 - 1
MAX_LENGTH: Final = (1 << 31) - 1
"""Tokens: what any engine counts with."""
MAX_TOKEN: Final = (1 << 32) - 1
"""The largest token id: they travel as 32 bits."""
MAX_STOP_TOKENS: Final = 1024
"""Models have a handful."""

MIN_LOGPROB: Final = -1e4
"""No token is sampled that is less likely than this; it keeps infinities and NaN out."""


TOP_P_BORDER: Final = 0.05
"""Probability by which rounding may move the border of a nucleus: of bfloat16's 0.06 nats a token, for a token that has
most of the mass. Without it, one token in 500 of an honest node's would be impossible in another's arithmetic."""


OPTIONS: Final = "options"
"""The ability to draw by `SamplingOptions`."""
SCORE_OPTIONS: Final = "score-options"
"""The ability to score tokens that were drawn by `SamplingOptions` which change the distribution."""
EXACT_SEED: Final = "exact-seed"
"""The ability to draw the same tokens for the same seed, whatever else the engine draws meanwhile."""
ABILITIES: Final = frozenset({OPTIONS, SCORE_OPTIONS, EXACT_SEED})
"""What an engine may be able to do beyond `SamplingParams` without options."""

MAX_LISTED: Final = 4096
"""Tokens that may be allowed: 20 kB of a work lease."""
MAX_BIASED: Final = 1024
"""OpenAI's endpoint takes 300."""
MAX_BANNED: Final = 256
"""Banned token sequences; vLLM takes 1,000 words."""
MAX_BANNED_LENGTH: Final = 64
"""Tokens of one."""
MAX_STOP_TEXTS: Final = 16
MAX_STOP_TEXT: Final = 1024
"""Characters."""


class EngineError(SwarmError):
    """The engine cannot serve: nothing is loaded or attached, or a commit failed and it waits to be reloaded."""


class SamplingOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What not every engine and not every release can do. Each default changes nothing.

    An engine works on the logits in this order: `allowed`, `banned`, `min_tokens`, `logit_bias`, the penalties; then,
    unless it is greedy, temperature, `min_p`, `top_k`, `SamplingParams.top_p`. That is vLLM's order.
    Raises `ValueError` when out of range.
    """

    min_tokens: int = 0
    """Neither a stop token nor a stop text ends a completion before it has so many tokens."""
    top_k: int = 0
    """Only the so many likeliest tokens are drawn; 0: all."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest are drawn."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that was drawn before."""
    frequency_penalty: float = 0.0
    """The same, as often as the token was drawn."""
    repetition_penalty: float = 1.0
    """Logits of tokens that are in the prompt or were drawn: divided by it where positive, else multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), ascending by token."""
    allowed: tuple[int, ...] = ()
    """Only these tokens are drawn, ascending; empty: all."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not drawn: after all but the last token of one, the last is not drawn."""
    stop_texts: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these in the text that was drawn."""
    special: bool = False
    """That text includes special tokens."""
    seeded: bool = False
    """The random numbers depend on the seed and the sample's number alone, not on the group."""
    exact: bool = False
    """What else the engine draws meanwhile changes no token. Needs the ability `EXACT_SEED`."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_tokens <= MAX_LENGTH:
            raise ValueError("min_tokens: 0 to 2^31 - 1")
        if not 0 <= self.top_k <= MAX_LENGTH:
            raise ValueError("top_k: 0 (all tokens) to 2^31 - 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError("min_p: 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name}: -2 to 2")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise ValueError("repetition_penalty: above 0, at most 100")
        if not _ascending([token for token, _ in self.logit_bias], MAX_BIASED):
            raise ValueError(f"logit_bias: at most {MAX_BIASED} token ids, each once, from 0 to 2^32 - 1")
        if not all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias):
            raise ValueError("logit_bias: each value from -100 to 100")
        if not _ascending(self.allowed, MAX_LISTED):
            raise ValueError(f"allowed: at most {MAX_LISTED} token ids, each once, from 0 to 2^32 - 1")
        if len(self.banned) > MAX_BANNED or not all(1 <= len(each) <= MAX_BANNED_LENGTH for each in self.banned):
            raise ValueError(f"banned: at most {MAX_BANNED} sequences of 1 to {MAX_BANNED_LENGTH} tokens")
        if not all(0 <= token <= MAX_TOKEN for each in self.banned for token in each):
            raise ValueError("banned: token ids from 0 to 2^32 - 1")
        if len(self.stop_texts) > MAX_STOP_TEXTS or not all(
            1 <= len(text) <= MAX_STOP_TEXT for text in self.stop_texts
        ):
            raise ValueError(f"stop: at most {MAX_STOP_TEXTS} texts of 1 to {MAX_STOP_TEXT} characters")

    @property
    def reshapes(self) -> bool:
        """It changes the distribution that tokens are drawn from."""
        return self != SamplingOptions(
            stop_texts=self.stop_texts, special=self.special, seeded=self.seeded, exact=self.exact
        )

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the options that ask for something."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) != getattr(_PLAIN, name))

    def never(self, stop_tokens: Sequence[int]) -> set[int]:
        """Tokens that may be out of the question at some moment, `stop_tokens` being those that end a completion."""
        return {each[-1] for each in self.banned} | (set(stop_tokens) if self.min_tokens else set())


def _ascending(tokens: Sequence[int], most: int) -> bool:
    in_range = len(tokens) <= most and all(0 <= token <= MAX_TOKEN for token in tokens)
    return in_range and all(a < b for a, b in pairwise(tokens))


_PLAIN: Final = SamplingOptions()


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample. `temperature` 0 is greedy. Raises `ValueError` when out of range.

    A completion ends after `max_tokens` tokens, or with the first of `stop_tokens`, which is then its last token.
    `options`: left out of the encoded form where it is unset, so that older nodes sign the same `work_hash`; work that
    has options goes only to nodes that say that they know them (`node.ledger.messages.Abilities`).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    options: SamplingOptions | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MAX_LENGTH:
            raise ValueError("max_tokens: at least 1, at most 2^31 - 1")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError("temperature: 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError("top_p: above 0, at most 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError("seed: 0 to 2^64 - 1")
        if len(self.stop_tokens) > MAX_STOP_TOKENS or not all(0 <= token <= MAX_TOKEN for token in self.stop_tokens):
            raise ValueError(f"stop_tokens: at most {MAX_STOP_TOKENS} token ids, each from 0 to 2^32 - 1")
        if self.options is msgspec.UNSET:
            return
        if self.options.min_tokens > self.max_tokens:
            raise ValueError("min_tokens: at most max_tokens")
        if self.options.allowed and not set(self.options.allowed) - self.options.never(self.stop_tokens):
            raise ValueError("allowed_token_ids: bad_words and min_tokens leave none of these tokens to draw")

    @property
    def widest_top_p(self) -> float:
        """What the top-p cut may have been by another's rounding."""
        return min(1.0, self.top_p + TOP_P_BORDER)

    @property
    def extra(self) -> SamplingOptions:
        """`options`, or those that change nothing."""
        return _PLAIN if self.options is msgspec.UNSET else self.options


def needs(sampling: SamplingParams) -> frozenset[str]:
    """The abilities that an engine needs to draw by `sampling`."""
    if sampling.options is msgspec.UNSET:
        return frozenset()
    return frozenset({OPTIONS, EXACT_SEED} if sampling.options.exact else {OPTIONS})


def scoring_needs(sampling: SamplingParams) -> frozenset[str]:
    """The abilities that an engine needs to score what was drawn by `sampling`."""
    return frozenset({SCORE_OPTIONS} if sampling.extra.reshapes else ())


class Prompt(msgspec.Struct, frozen=True):
    """Token ids to continue. `stream` picks the random numbers together with the sampling seed.

    Two prompts with one (seed, stream) draw with the same random numbers wherever they stand in a batch: give every
    sample of a group its own stream.
    """

    token_ids: tuple[int, ...]
    stream: int = 0

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("token_ids: empty prompt")
        if not 0 <= self.stream <= MAX_SEED:
            raise ValueError("stream: 0 to 2^64 - 1")


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a completion were sampled from this version."""

    version: Version
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True):
    """What an engine sampled for one prompt.

    `logprobs`: one float32 value a token, the natural logarithm of the probability that the token had in the
    distribution it was drawn from: after temperature, after the top-p cut and after what `SamplingOptions` do to it.
    For a greedy completion it is that of the distribution at temperature 1, since the true one would say 0 everywhere.

    Raises `ValueError` when lengths disagree, a log-probability is not one, or the spans are not the tokens in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise ValueError("logprobs: one for each token, and at least one token")
        if not all(MIN_LOGPROB <= p <= 0.0 for p in self.logprobs):
            raise ValueError("logprobs: not logarithms of probabilities")
        edges = [edge for span in self.spans for edge in (span.start, span.end)]
        inner_meet = all(a.end == b.start for a, b in pairwise(self.spans))
        if not edges or edges != sorted(edges) or edges[0] != 0 or edges[-1] != len(self.token_ids) or not inner_meet:
            raise ValueError("spans: must cover the tokens in order")


class Engine(ABC):
    """Generates from one model and takes new versions of it in place.

    Life: `load`, `attach`, then any number of `generate`, `stage`, `commit`, `live_hashes`, `reload`. A commit that
    fails poisons the engine: `poisoned` says why, and `generate`, `stage` and `commit` raise `EngineError` until
    `reload` has written every bit anew. So it never serves a mix of versions.
    """

    version: Version
    """What the live parameters hold, as the last `attach`, `commit` or `reload` said."""

    root: bytes
    """State root of that version (32 bytes, or empty when nobody said it)."""

    poisoned: str | None
    """Why the engine may not serve, or None."""

    abilities: frozenset[str] = frozenset()
    """Of `ABILITIES`: an engine that names none is given no work that needs one."""

    kind: str = ""
    """Engines of one kind draw the same tokens for the same seed, as far as their machines compute alike."""

    @abstractmethod
    def load(self, folder: Path, *, weights: bool = True) -> None:
        """Load a Hugging Face folder (config, weights). Raises `UsageError` when it is not one.

        Without `weights` only its config counts, and the parameters hold nothing of use until `attach` and `reload`.
        """

    @abstractmethod
    def attach(self, layout: Layout, version: Version = BASE_VERSION, root: bytes = b"") -> None:
        """Map each tensor of `layout` to its live parameter; from now on the engine says that it holds `version`.

        Nothing is compared here: whoever needs proof asks `live_hashes`. Raises `UsageError` when the loaded model has
        other tensors, shapes or dtypes, or ties other tensors, than the layout.
        """

    @abstractmethod
    def stage(self, patch: Patch) -> None:
        """Convert and hold the next version's bits without touching a live parameter; replaces what was staged.

        Raises `ValueError`, with nothing staged, when the patch does not fit the layout.
        """

    @abstractmethod
    def commit(self, version: Version, root: bytes) -> float:
        """Scatter what is staged (nothing staged: no bits change) and take the name. Returns the pause in seconds."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """One completion for each prompt, in their order, all from the version held now."""

    @abstractmethod
    def live_hashes(self, layout: Layout) -> NDArray[np.uint8]:
        """BLAKE3 of every block of `layout`, read back out of the live parameters: uint8, (n_blocks, 32).

        A tied tensor counts once, as in the layout. Works on a poisoned engine too, to see what it holds.
        """

    @abstractmethod
    def reload(self, bits: Callable[[str], NDArray[np.unsignedinteger]], version: Version, root: bytes) -> None:
        """Write every tensor of the layout anew and clear the poison. `bits(name)`: all elements, flat or shaped."""


class SteppedEngine(Engine):
    """An engine that can stop after any token: prompts come in while others run, and a commit may fall in between.

    A commit loses no token then. What goes on after it carries one span for each version; whether what was cached
    under the older bits is computed anew is the engine's stated policy.
    """

    @abstractmethod
    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        """Start one completion for each prompt, together. `flight`: a number that is not in use. Raises `ValueError`
        for prompts that the model cannot read, `EngineError` as `generate` does; nothing is begun then."""

    @abstractmethod
    def step(self) -> list[tuple[int, list[Completion]]]:
        """About one more token for everything that runs; flights that are done, with all their completions.

        Raises whatever went wrong; then every flight is to be cancelled.
        """

    @abstractmethod
    def cancel(self, flight: int) -> None:
        """Forget a flight; one that is not known is no matter."""

    @abstractmethod
    def counts(self) -> dict[int, list[int]]:
        """Tokens so far, of each flight's prompts in their order. Not empty while anything runs."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """One completion for each prompt, in their order, with nothing else running."""
        assert not self.counts(), "flights are running: use begin and step"
        self.begin(-1, prompts, sampling)
        try:
            while True:
                for _, completions in self.step():
                    return completions
        finally:
            self.cancel(-1)


@runtime_checkable
class Scorer(Protocol):
    """An engine that can say how likely given tokens are, which is how others' rollouts are checked."""

    def score(self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams) -> tuple[float, ...]:
        """The logarithm of the probability of each of `token_ids` after `prompt` and those before it, in the sense of
        `Completion.logprobs`, under the version held now. A token that lies just outside the nucleus
        (`SamplingParams.widest_top_p`) counts as if it were inside; -inf for what no rounding would have drawn."""
        ...
