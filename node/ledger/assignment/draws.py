"""Which draws a lease asks for: portable ones by default, so that every sample can be drawn again. Pure.

Where a group's sampling has no options (but an adapter, and what changes no token: routes, likeliest tokens, scores of
the prompt, a reward), is not greedy, and its node is able to draw and judge portably, the lease asks for portable draws
in the group's place. Sampling with other options is leased as it is, so a trainer that wants the engine's own draws
gives options without `portable`, or starts the seed without them (`Settings.portable_draws`). So are whole groups:
their bits must not depend on the node. Nodes that are not able get the messages of older releases, byte for byte.
"""

from typing import Final

import msgspec

from node.engines.base import JUDGES, OPTIONS, PORTABLE_DRAWS, SamplingOptions, SamplingParams
from node.ledger.messages import Rollout, work_hash
from node.ledger.settings import Settings
from node.ledger.state import Group, LiveLease, Node

__all__ = ["as_judged", "drawn_with", "in_its_place", "is_portable", "sampling_of", "samplings_of"]

ABLE: Final = frozenset({OPTIONS, PORTABLE_DRAWS, JUDGES})


def is_portable(group: Group, node: Node, settings: Settings) -> bool:
    """Whether a lease of `group` to `node` asks for portable draws that the group does not ask for itself."""
    able = node.abilities is not None and node.abilities >= ABLE
    return settings.portable_draws and able and _may_be(group)


def _may_be(group: Group) -> bool:
    extra = group.sampling.extra
    told = SamplingOptions(
        adapter=extra.adapter, routes=extra.routes, top_logprobs=extra.top_logprobs,
        prompt_logprobs=extra.prompt_logprobs, reward=extra.reward,
    )  # fmt: skip
    plain, unset = extra == told, group.sampling.options is msgspec.UNSET or told != SamplingOptions()
    return plain and unset and group.sampling.temperature > 0.0 and not group.whole


def sampling_of(group: Group, portable: bool) -> SamplingParams:
    """The sampling that a lease of `group` asks for."""
    return in_its_place(group.sampling) if portable else group.sampling


def in_its_place(sampling: SamplingParams) -> SamplingParams:
    """The sampling with portable draws that a lease may ask for in the place of `sampling`, which has no options but
    those that change no token and an adapter."""
    return sampling.with_options(portable=True)


def as_judged(sampling: SamplingParams) -> SamplingParams:
    """`sampling` without what changes no token: how tokens are judged, also by nodes of releases that know neither
    routes nor likeliest tokens nor rewards."""
    nothing = {"routes": False, "top_logprobs": 0, "prompt_logprobs": None, "reward": None}
    changes = {name: value for name, value in nothing.items() if getattr(sampling.extra, name) != value}
    return sampling.with_options(**changes) if changes else sampling


def samplings_of(group: Group, lease: LiveLease) -> tuple[SamplingParams, ...]:
    """The sampling that was leased. Both, for a lease that the book kept, which does not say."""
    if lease.portable is not None:
        return (sampling_of(group, lease.portable),)
    return (group.sampling, sampling_of(group, True)) if _may_be(group) else (group.sampling,)


def drawn_with(
    group: bytes, prompt: bytes, rollout: Rollout, samplings: tuple[SamplingParams, ...]
) -> SamplingParams | None:
    """Which of `samplings` the node signed, for this group and prompt (packed); None: none of them."""
    for sampling in samplings:
        if rollout.work == work_hash(group, rollout.sample, prompt, sampling):
            return sampling
    return None
