"""The values that a node and its engines exchange: versions, prompts, sampling parameters and completions.

The interface of an engine is in `node.engines.interface`. Nothing here needs torch, so every part of a node can import
this module.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import msgspec

from codec.errors import SwarmError

__all__ = [
    "ABILITIES",
    "ADAPTERS",
    "ADAPTER_NAME",
    "BASE_VERSION",
    "EXACT_SEED",
    "IMAGES",
    "JUDGES",
    "JUDGES_ADAPTERS",
    "MAX_IMAGES",
    "MAX_REWARD_METADATA",
    "OPTIONS",
    "PORTABLE_DRAWS",
    "PROMPT_LOGPROBS",
    "REPLAYS",
    "REWARD_NAME",
    "ROUTES",
    "SCORE_OPTIONS",
    "STRUCTURES",
    "TOP_LOGPROBS",
    "Completion",
    "EngineError",
    "Prompt",
    "RewardAsked",
    "SamplingOptions",
    "SamplingParams",
    "Span",
    "Version",
    "needs",
    "scoring_needs",
]

Version = tuple[int, int]
"""(epoch, v): compared as a tuple, so every version of a later epoch is newer than all of an earlier one."""

BASE_VERSION: Final[Version] = (0, 0)

MAX_SEED: Final = 2**64 - 1
MAX_LENGTH: Final = (1 << 31) - 1
"""Tokens. Engines count tokens with signed 32-bit integers."""
MAX_TOKEN: Final = (1 << 32) - 1
"""The largest token id. Token ids are sent as 32 bits."""
MAX_STOP_TOKENS: Final = 1024
"""Stop tokens of one request. Models have a handful."""

MIN_LOGPROB: Final = -1e4
"""The smallest log-probability of a sampled token, in nats. The bound keeps infinities and NaN out."""

TOP_P_BORDER: Final = 0.05
"""Probability by which rounding may move the border of a nucleus: bfloat16's error of 0.06 nats a token, for a token
that has most of the mass. Without it, one token in 500 of an honest node would be impossible in another node's
arithmetic."""

OPTIONS: Final = "options"
"""The ability to draw by `SamplingOptions`."""
SCORE_OPTIONS: Final = "score-options"
"""The ability to score tokens that were drawn by `SamplingOptions` which change the distribution."""
EXACT_SEED: Final = "exact-seed"
"""The ability to draw the same tokens for the same seed, whatever else the engine draws at the same time."""
PORTABLE_DRAWS: Final = "portable-draws"
"""The ability to draw by the noise of `node.verification.noise`, which others can compute."""
JUDGES: Final = "judges"
"""The ability to judge tokens that another node says it drew (`node.engines.judgement`)."""
REPLAYS: Final = "replays"
"""The ability to judge tokens by computing them as they were drawn, bit for bit: see `Claim.replay`."""
ADAPTERS: Final = "adapters"
"""The ability to draw with an adapter of the swarm (`SamplingOptions.adapter`)."""
JUDGES_ADAPTERS: Final = "judges-adapters"
"""The ability to score, judge and replay tokens that were drawn with an adapter, as far as the engine does so for
tokens of the base: with that adapter, at the engine's version."""
ROUTES: Final = "routes"
"""The ability to record which experts each token took. Only of an engine that holds a mixture of experts."""
STREAMS: Final = "streams"
"""The ability to tell the tokens of a completion as they are drawn."""
TOP_LOGPROBS: Final = "top-logprobs"
"""The ability to tell the likeliest tokens of each draw (`SamplingOptions.top_logprobs`)."""
PROMPT_LOGPROBS: Final = "prompt-logprobs"
"""The ability to score the prompt that it continues (`SamplingOptions.prompt_logprobs`)."""
STRUCTURES: Final = "structures"
"""The ability to draw only a text that is what was asked for (`SamplingOptions.structure`)."""
SCORE_STRUCTURES: Final = "score-structures"
"""The ability to score tokens that were drawn so. No engine has it: another library may leave other tokens, or another
engine none of them, so such samples are not judged."""
IMAGES: Final = "images"
"""The ability to read the images of a prompt (`SamplingOptions.images`). Only of an engine whose model reads images."""
SCORE_IMAGES: Final = "score-images"
"""The ability to score tokens that follow images. No engine has it: libraries of different releases scale an image
otherwise, and an engine that does not read images reads another text, so such samples are not judged."""
ABILITIES: Final = frozenset(
    {OPTIONS, SCORE_OPTIONS, EXACT_SEED, PORTABLE_DRAWS, JUDGES, REPLAYS, ADAPTERS, JUDGES_ADAPTERS, ROUTES, STREAMS}
    | {TOP_LOGPROBS, STRUCTURES, PROMPT_LOGPROBS, IMAGES}
)
"""Everything that an engine may be able to do beyond `SamplingParams` without options."""

MAX_LISTED: Final = 4096
"""Tokens in `SamplingOptions.allowed`: 20 kB of a work lease."""
MAX_BIASED: Final = 1024
"""Entries of `SamplingOptions.logit_bias`. OpenAI's endpoint takes 300."""
MAX_BANNED: Final = 256
"""Sequences in `SamplingOptions.banned`. vLLM takes 1,000 words."""
MAX_BANNED_LENGTH: Final = 64
"""Tokens of one banned sequence."""
MAX_STRUCTURE: Final = 1 << 16
"""Characters of `SamplingOptions.structure`."""
MAX_TOP: Final = 20
"""Tokens of `SamplingOptions.top_logprobs` and `prompt_logprobs`, as OpenAI's and vLLM's."""
MAX_IMAGES: Final = 16
"""Images of one prompt."""
DIGEST_BYTES: Final = 32
"""Of an image's digest (`node.engines.images.digest_of`)."""
MAX_STOP_TEXTS: Final = 16
MAX_STOP_TEXT: Final = 1024
"""Characters of one stop text."""
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The whole name of an adapter; as `codec.AdapterConfig` has it."""
REWARD_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,32}")
"""The whole name of a reward."""
_REWARD: Final = re.compile(rf"{REWARD_NAME.pattern}(@[0-9a-f]{{16}})?")
MAX_REWARD_METADATA: Final = 16 << 10
"""Bytes of what a reward function gets with a prompt. It travels with each work lease of the prompt."""


class EngineError(SwarmError):
    """The engine cannot serve: nothing is loaded or attached, or a commit failed and the engine must be reloaded."""


class RewardAsked(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The reward that a node computes for a sample, by a function that it has under this name.

    `name`: 1 to 32 of the characters A-Z a-z 0-9 . _ -; with "@" and 16 hexadecimal digits, only the function of this
    digest (`node.rewards.registry`). `metadata`: a JSON object (UTF-8), which the function gets. Raises `ValueError`
    when either is out of range.
    """

    name: str
    metadata: bytes = b"{}"

    def __post_init__(self) -> None:
        if not _REWARD.fullmatch(self.name):
            raise ValueError("reward: a name of 1 to 32 of the characters A-Z a-z 0-9 . _ -, perhaps with @DIGEST")
        if len(self.metadata) > MAX_REWARD_METADATA:
            raise ValueError(f"reward_metadata: {len(self.metadata):,} bytes; at most {MAX_REWARD_METADATA:,}")

    @property
    def ability(self) -> str:
        """What a node that can compute it declares."""
        return f"reward:{self.name}"

    def __repr__(self) -> str:
        return f"RewardAsked({self.name!r}, {len(self.metadata)} bytes)"


class SamplingOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling options that not every engine and not every release has. Each default changes nothing.

    An engine changes the logits in this order: `allowed`, `banned`, `min_tokens`, `logit_bias`, the penalties; then,
    unless it is greedy, temperature, `min_p`, `top_k`, `SamplingParams.top_p`. That is vLLM's order.
    Raises `ValueError` when out of range.
    """

    min_tokens: int = 0
    """No stop token and no stop text ends a completion that has fewer tokens than this."""
    top_k: int = 0
    """Only this many of the likeliest tokens can be drawn; 0: all."""
    min_p: float = 0.0
    """Only tokens whose probability is at least this fraction of the likeliest token's can be drawn."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was drawn before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token, once for each time that it was drawn before."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the others, of tokens that are in the prompt or were drawn."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, addend to its logit), ascending by token."""
    allowed: tuple[int, ...] = ()
    """Only these tokens can be drawn, ascending; empty: all."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never drawn: after all but the last token of a sequence, its last token is excluded."""
    stop_texts: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these texts."""
    special: bool = False
    """Special tokens are part of the text in which `stop_texts` are looked for."""
    seeded: bool = False
    """The random numbers depend only on the seed and the sample's number, not on the request group."""
    exact: bool = False
    """Other work of the engine at the same time changes no token. Needs the ability `EXACT_SEED`."""
    portable: bool = False
    """Each token is the argmax of log-probability plus `node.verification.noise.gumbel` of (seed, stream, position), so
    that others can draw the sample again. Needs the ability `PORTABLE_DRAWS`; no effect on a greedy completion."""
    adapter: str = ""
    """The name of the adapter that is added to the base's weights; empty: none. Needs the ability `ADAPTERS`, and that
    adapter in the engine."""
    routes: bool = False
    """The completion says which experts each token took (`Completion.routes`). Needs the ability `ROUTES`."""
    top_logprobs: int = 0
    """The completion says which tokens were the likeliest at each draw (`Completion.top`), so many of them. Needs the
    ability `TOP_LOGPROBS`."""
    prompt_logprobs: int | None = None
    """The completion says how likely each token of its prompt is, and which tokens are the likeliest in its place, so
    many of them (`Completion.prompt_scores`); None: it does not. Needs the ability `PROMPT_LOGPROBS`."""
    structure: str = ""
    """What the text of the completion must be (`node.engines.structures`); empty: any text. Needs the ability
    `STRUCTURES`."""
    reward: RewardAsked | None = None
    """The node computes this reward of the completion. It changes no token, and engines do not see it. Needs its
    `RewardAsked.ability`."""
    images: tuple[bytes, ...] = ()
    """The digests of the prompt's images, in the order of their places in the prompt. Needs the ability `IMAGES`, and
    the images themselves (`Prompt.images`)."""

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
        if len(self.banned) > MAX_BANNED or not all(1 <= len(words) <= MAX_BANNED_LENGTH for words in self.banned):
            raise ValueError(f"banned: at most {MAX_BANNED} sequences of 1 to {MAX_BANNED_LENGTH} tokens")
        if not all(0 <= token <= MAX_TOKEN for words in self.banned for token in words):
            raise ValueError("banned: token ids from 0 to 2^32 - 1")
        if len(self.stop_texts) > MAX_STOP_TEXTS or not all(
            1 <= len(text) <= MAX_STOP_TEXT for text in self.stop_texts
        ):
            raise ValueError(f"stop: at most {MAX_STOP_TEXTS} texts of 1 to {MAX_STOP_TEXT} characters")
        if self.adapter and not ADAPTER_NAME.fullmatch(self.adapter):
            raise ValueError("adapter: a name of 1 to 64 of the characters A-Z a-z 0-9 . _ -")
        if not 0 <= self.top_logprobs <= MAX_TOP:
            raise ValueError(f"top_logprobs: 0 to {MAX_TOP}")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_TOP:
            raise ValueError(f"prompt_logprobs: 0 to {MAX_TOP}")
        if len(self.structure) > MAX_STRUCTURE:
            raise ValueError(f"structure: at most {MAX_STRUCTURE} characters")
        if len(self.images) > MAX_IMAGES or not all(len(digest) == DIGEST_BYTES for digest in self.images):
            raise ValueError(f"images: at most {MAX_IMAGES} digests of {DIGEST_BYTES} bytes")

    @property
    def reshapes(self) -> bool:
        """Whether the options change the distribution that the weights give."""
        return self != SamplingOptions(
            stop_texts=self.stop_texts,
            special=self.special,
            seeded=self.seeded,
            exact=self.exact,
            portable=self.portable,
            adapter=self.adapter,
            routes=self.routes,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            reward=self.reward,
            images=self.images,
        )

    @property
    def asked(self) -> tuple[str, ...]:
        """The names of the options that differ from their defaults."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) != getattr(_PLAIN, name))

    def never(self, stop_tokens: Sequence[int]) -> set[int]:
        """The tokens that may be excluded at some step. `stop_tokens`: the tokens that end a completion."""
        return {words[-1] for words in self.banned} | (set(stop_tokens) if self.min_tokens else set())


def _ascending(tokens: Sequence[int], most: int) -> bool:
    in_range = len(tokens) <= most and all(0 <= token <= MAX_TOKEN for token in tokens)
    return in_range and all(a < b for a, b in pairwise(tokens))


_PLAIN: Final = SamplingOptions()


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample. `temperature` 0 is greedy. Raises `ValueError` when out of range.

    `top_p`: draw from the smallest set of tokens whose probabilities sum to at least `top_p` (nucleus sampling,
    Holtzman et al. 2020). `seed`: the same prompt, seed and version give the same tokens on engines of one class.
    A completion ends after `max_tokens` tokens, or with the first of `stop_tokens`, which is then its last token.
    `options`: absent from the encoded form when unset, so that older nodes sign the same `work_hash`. Work with options
    goes only to nodes that declare the ability (`node.ledger.messages.Abilities`).
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
        """The largest top-p cut that another engine's rounding may have made."""
        return min(1.0, self.top_p + TOP_P_BORDER)

    @property
    def tightest_top_p(self) -> float:
        """The smallest top-p cut that another engine's rounding may have made; above 0: the likeliest token stays."""
        return 1.0 if self.top_p == 1.0 else max(1e-9, self.top_p - TOP_P_BORDER)

    @property
    def extra(self) -> SamplingOptions:
        """`options`, or the defaults when it is unset."""
        return _PLAIN if self.options is msgspec.UNSET else self.options

    @property
    def drawing(self) -> "SamplingParams":
        """The same without a reward: samples of equal `drawing` may share a batch."""
        return self if self.extra.reward is None else self.with_options(reward=None)

    def with_options(self, **changes: Any) -> "SamplingParams":
        """The same with these options changed; `options` is unset if all have their defaults then."""
        options = msgspec.structs.replace(self.extra, **changes)
        return msgspec.structs.replace(self, options=msgspec.UNSET if options == _PLAIN else options)


def needs(sampling: SamplingParams) -> frozenset[str]:
    """The abilities that a node needs to do what `sampling` asks for."""
    if sampling.options is msgspec.UNSET:
        return frozenset()
    options = sampling.options
    wanted = {
        EXACT_SEED: options.exact,
        PORTABLE_DRAWS: options.portable,
        ADAPTERS: bool(options.adapter),
        ROUTES: options.routes,
        TOP_LOGPROBS: options.top_logprobs > 0,
        PROMPT_LOGPROBS: options.prompt_logprobs is not None,
        STRUCTURES: bool(options.structure),
        IMAGES: bool(options.images),
    }
    if options.reward is not None:
        wanted[options.reward.ability] = True
    return frozenset({OPTIONS, *(ability for ability, needed in wanted.items() if needed)})


def scoring_needs(sampling: SamplingParams) -> frozenset[str]:
    """The abilities that an engine needs to score tokens that were drawn by `sampling`."""
    options = sampling.extra
    wanted = {
        SCORE_OPTIONS: options.reshapes,
        SCORE_STRUCTURES: bool(options.structure),
        SCORE_IMAGES: bool(options.images),
        JUDGES_ADAPTERS: bool(options.adapter),
    }
    return frozenset(ability for ability, needed in wanted.items() if needed)


class Prompt(msgspec.Struct, frozen=True):
    """Token ids to continue. The sampling seed and `stream` together determine the random numbers.

    Two prompts with the same (seed, stream) draw with the same random numbers at any place of a batch, so every sample
    of a request group needs a stream of its own. `routes`: with `SamplingOptions.routes`, those of the prompt's tokens
    are wanted, too. `images`: those of `SamplingOptions.images`, as PNG, JPEG or WebP. Raises `ValueError` for an empty
    prompt or a stream out of range.
    """

    token_ids: tuple[int, ...]
    stream: int = 0
    routes: bool = False
    images: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("token_ids: empty prompt")
        if not 0 <= self.stream <= MAX_SEED:
            raise ValueError("stream: 0 to 2^64 - 1")


class Span(msgspec.Struct, frozen=True):
    """The tokens [start, end) of a completion, and the version that they were sampled from."""

    version: Version
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True):
    """The tokens that an engine sampled for one prompt.

    `logprobs`: one float32 value a token, the natural logarithm of the token's probability in the distribution that it
    was drawn from, after `SamplingOptions`, temperature and the top-p cut. For a greedy completion it is the
    log-probability at temperature 1, because the true one is 0 everywhere.

    `routes`: with `SamplingOptions.routes`, the experts of the pass that each token was drawn from, coded by
    `codec.routes`, a row a token: row i is of the position before token i. `prompt_routes`: the same for the prompt's
    positions but the last, whose row is the first of `routes`; empty unless the prompt asked for it. `top`: with
    `SamplingOptions.top_logprobs`, the likeliest tokens of each draw, packed by `node.engines.top_logprobs`, with
    log-probabilities of the same distribution as `logprobs`.

    `prompt_scores`: with `SamplingOptions.prompt_logprobs`, how likely the model finds each token of the prompt but the
    first after those before it, packed by `node.engines.prompt_scores`: at temperature 1 over the whole vocabulary,
    whatever the sampling, by the version that drew the first token.

    Raises `ValueError` when lengths disagree, a log-probability is out of range, or the spans do not cover the tokens
    in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    spans: tuple[Span, ...]
    routes: bytes = b""
    prompt_routes: bytes = b""
    top: bytes = b""
    prompt_scores: bytes = b""

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise ValueError("logprobs: one for each token, and at least one token")
        if not all(MIN_LOGPROB <= p <= 0.0 for p in self.logprobs):
            raise ValueError("logprobs: not logarithms of probabilities")
        edges = [edge for span in self.spans for edge in (span.start, span.end)]
        inner_meet = all(a.end == b.start for a, b in pairwise(self.spans))
        if not edges or edges != sorted(edges) or edges[0] != 0 or edges[-1] != len(self.token_ids) or not inner_meet:
            raise ValueError("spans: must cover the tokens in order")


class DrawnTokens(msgspec.Struct, frozen=True):
    """Tokens of a completion that is not finished: those from number `start` on.

    `version`: the one that drew them; of an engine in other processes, the one that it held when they came, which may
    be one too new. The spans of the completion say it exactly. `logprobs`: as in `Completion`, one a token. `top`: as
    there, of these tokens. Raises `ValueError` when lengths disagree, there is no token, or a value is out of range.
    """

    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: Version
    top: bytes = b""

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise ValueError("logprobs: one for each token, and at least one token")
        if not 0 <= self.start <= MAX_LENGTH or not all(0 <= token <= MAX_TOKEN for token in self.token_ids):
            raise ValueError("token_ids: out of range")
        if not all(MIN_LOGPROB <= p <= 0.0 for p in self.logprobs):
            raise ValueError("logprobs: not logarithms of probabilities")

    @property
    def end(self) -> int:
        """The number of the first token after these."""
        return self.start + len(self.token_ids)
