"""What a node's engine is asked for each sample of a lease, and the rollout that the node signs of the answer. Pure."""

from collections.abc import Sequence
from typing import Final

from node.engines.base import Completion, Prompt
from node.engines.prompt_scores import scores_bytes
from node.engines.top_logprobs import PAIR
from node.ledger.messages import RewardClaim, Rollout, VersionSpan, stream_of, work_hash
from node.ledger.packing import pack_floats, pack_tokens
from node.member.lease_inventory import Held, Job

__all__ = ["prompt_of", "rollout_of", "rows_at_once"]

ROUTE_BYTES: Final = 1 << 10
"""Of one token's routes, at most: the largest mixtures of experts have half of it."""
ANSWER_BYTES: Final = 24 << 20
"""Of the routes, likeliest tokens and scores of prompts in one answer of the engine, which is one frame
(`node.ipc.framing`)."""


def prompt_of(held: Held, sample: int, images: tuple[bytes, ...] = ()) -> Prompt:
    """What the engine is asked. The routes of the prompt are wanted with the lease's first sample. `images`: those that
    its sampling names."""
    lease = held.message
    first = lease.sampling.extra.routes and sample == min(lease.samples)
    return Prompt(held.prompt, stream_of(lease.group, sample, lease.sampling), first, images)


def rollout_of(
    held: Held,
    sample: int,
    completion: Completion,
    spans: tuple[VersionSpan, ...],
    reward: RewardClaim | None = None,
) -> Rollout:
    """The rollout of a sample, from the engine's completion. `spans`: its spans as they are signed."""
    lease = held.message
    return Rollout(
        lease=lease.lease,
        token=lease.token,
        sample=sample,
        work=work_hash(lease.group, sample, lease.prompt, lease.sampling),
        token_ids=pack_tokens(completion.token_ids),
        logprobs=pack_floats(completion.logprobs),
        finish_reason=completion.finish_reason,
        spans=spans,
        routes=completion.routes,
        prompt_routes=completion.prompt_routes,
        top=completion.top,
        reward=reward,
        prompt_scores=completion.prompt_scores,
    )


def rows_at_once(jobs: Sequence[Job]) -> int:
    """How many of these samples, which have the same sampling, may be one call of the engine: as many as its answer has
    room for with their routes, likeliest tokens and scores of prompts; all of them, if none of these is asked for."""
    sampling = jobs[0][0].message.sampling
    longest = max(len(held.prompt) for held, _ in jobs)
    token_bytes = ROUTE_BYTES * sampling.extra.routes + PAIR.itemsize * sampling.extra.top_logprobs
    sample_bytes = token_bytes * (longest + sampling.max_tokens) + scores_bytes(longest, sampling.extra.prompt_logprobs)
    return max(1, ANSWER_BYTES // sample_bytes) if sample_bytes else len(jobs)
