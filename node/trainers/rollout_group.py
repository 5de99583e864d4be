"""What a trainer gets for a prompt: a group of rollouts, or the reason why there is none."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from codec.routes import Routes
from node.engines.base import SamplingParams, Span, Version
from node.ledger.packing import unpack_floats, unpack_tokens
from node.ledger.route_reader import Routed
from node.ledger.trust.checks import distance
from node.trainers.errors import PromptRefused
from node.trainers.messages import Sample

__all__ = ["Check", "RefusedPrompt", "Rollout", "RolloutGroup", "rollout_of", "routed_of"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One accepted sample.

    `token_ids`: the completion, without the prompt. `logprobs`: the natural logarithm of each token's probability in
    the distribution that it was sampled from, after temperature, top-p and options; for a greedy completion, at
    temperature 1. `finish_reason`: "stop" (the last token is a stop token) or "length". `spans`: which version of the
    swarm sampled which tokens, in order. `node`: public key (32 bytes) of the node that signed it.

    `adapter`: the one that drew it; empty: the base alone. `own`: for each span, the own version of the adapter, or of
    the base: how many versions of the swarm had changed it. Empty in a swarm without adapters, where that is the
    version. `lag`: how many versions that changed the adapter or the base its oldest token was behind when the seed
    sent it.

    `reward`: what the node's function made of the sample, if a reward was asked for; None: it was not, or the function
    gave no number, for the reason `no_reward`. `reward_checked`: another node, or this process, computed the same.

    `routes`: if they were asked for, which experts each token of prompt and completion but the last took: uint16,
    (tokens - 1, layers, k), ascending; see `node.trainers.routes`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[Span, ...]
    node: bytes
    adapter: str = ""
    own: tuple[int, ...] = ()
    lag: int = 0
    routes: Routes | None = field(default=None, compare=False, repr=False)
    reward: float | None = None
    no_reward: str = ""
    reward_checked: bool = False

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(epoch, version) of each token."""
        return tuple(span.version for span in self.spans for _ in range(span.start, span.end))

    @property
    def own_versions(self) -> tuple[int, ...]:
        """The own version of each token; see `own`."""
        owns = self.own or tuple(span.version[1] for span in self.spans)
        return tuple(own for own, span in zip(owns, self.spans, strict=True) for _ in range(span.start, span.end))


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """One prompt and its samples.

    `index`: which of the prompts, counted from 0. `prompt`: its token ids. `rollouts`: the samples. `n`: how many were
    asked for; of a partial group there are fewer (see `is_partial`). `sampling`: how they were sampled. `metadata`: as
    given with the prompt (`PromptSpec.metadata`); it never leaves this process.
    """

    index: int
    prompt: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    n: int = 0
    sampling: SamplingParams | None = None
    metadata: Any = field(default=None, compare=False)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """`Rollout.reward` of each sample."""
        return tuple(rollout.reward for rollout in self.rollouts)

    @property
    def is_partial(self) -> bool:
        """Whether it has fewer samples than were asked for, because its time was over (`partial_after_s`)."""
        return len(self.rollouts) < self.n

    @property
    def refused(self) -> None:
        """None: the prompt was not refused. See `RefusedPrompt.refused`."""
        return None

    @property
    def oldest(self) -> Version:
        """(epoch, version) of the oldest token in the group."""
        return min(span.version for rollout in self.rollouts for span in rollout.spans)

    @property
    def lag(self) -> int:
        """The largest `Rollout.lag` in the group."""
        return max(rollout.lag for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class RefusedPrompt:
    """What the iterator yields instead of a group when a prompt cannot be generated for. The other prompts go on.

    `index`: which of the prompts, counted from 0. `prompt`: as it was given. `refused`: why, in a sentence.
    `metadata`: as given with the prompt.
    """

    index: int
    prompt: Any
    refused: str
    metadata: Any = field(default=None, compare=False)

    @property
    def rollouts(self) -> NoReturn:
        """Raises `PromptRefused`, which ends a loop that uses this object as a group."""
        raise PromptRefused(self.index, self.refused)

    @property
    def oldest(self) -> NoReturn:
        """Raises `PromptRefused`."""
        raise PromptRefused(self.index, self.refused)


@dataclass(frozen=True, slots=True)
class Check:
    """The trainer's own check of the log-probabilities that nodes report, before it uses a group.

    `score(prompt, rollout)`: the log-probability of each token of the rollout under the version that it names, or None
    if the trainer no longer has that version. `share`: the share of the samples that is checked, picked at random, 0 to
    1. `tolerance`: the mean difference in nats a token that is accepted; `python -m scenarios.bench.check_tolerance`
    measures what rounding alone causes. A node beyond it is quarantined, and other samples take the place of its own.
    """

    score: Callable[[tuple[int, ...], Rollout], Sequence[float] | None]
    share: float = 0.02
    tolerance: float = 0.1

    def find_lie(self, prompt: tuple[int, ...], rollout: Rollout) -> str | None:
        """What is wrong with a rollout, in words. None: nothing, or it was not picked for a check."""
        if random.random() >= self.share or (scores := self.score(prompt, rollout)) is None:
            return None
        difference = distance(rollout.logprobs, scores)
        return None if difference <= self.tolerance else f"off by {difference:.3g} nats a token"


def routed_of(sample: Sample) -> Routed:
    """What is needed to read the routes of a sample."""
    epoch, version, _ = sample.spans[0]
    tokens = len(sample.token_ids) // 4
    return Routed(sample.routes, sample.prompt_routes, tokens, (epoch, version), sample.node)


def rollout_of(sample: Sample, adapter: str, routes: Routes | None) -> Rollout:
    """The rollout in a message. `adapter`: the one that drew it. `routes`: as they were read."""
    starts = (0, *(end for _, _, end in sample.spans))
    spans = tuple(Span((e, v), start, end) for start, (e, v, end) in zip(starts, sample.spans, strict=False))
    tokens, logprobs = unpack_tokens(sample.token_ids), unpack_floats(sample.logprobs)
    return Rollout(
        tokens, logprobs, sample.finish_reason, spans, sample.node, adapter, sample.own, sample.lag, routes,
        sample.reward, sample.no_reward, sample.reward_check == "checked",
    )  # fmt: skip
