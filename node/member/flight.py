"""Samples of a rollout worker that its engine generates together."""

from dataclasses import dataclass, field

import trio

from node.engines.base import Version
from node.member.lease_inventory import Job
from node.member.rollout import rows_at_once

__all__ = ["Flight", "divided"]


@dataclass(eq=False)
class Flight:
    """One call of the engine. `version`: what the engine held when it was begun."""

    jobs: list[Job]
    version: Version
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def adapter(self) -> str:
        """The adapter that draws the samples; empty: the base alone."""
        return self.jobs[0][0].message.sampling.extra.adapter


def divided(jobs: list[Job], *, one_by_one: bool) -> list[list[Job]]:
    """The samples of each call of the engine. A call ends with its longest sample, and places of shorter ones stay
    empty until then; so where the engine batches continuously (`one_by_one`) each sample is a call, except in a whole
    group."""
    if jobs[0][0].message.whole:
        return [jobs]
    most = 1 if one_by_one else rows_at_once(jobs)
    return [jobs[at : at + most] for at in range(0, len(jobs), most)]
