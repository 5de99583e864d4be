"""How many groups a trainer should offer now. Pure."""

import math

from node.ledger.assignment.consumption import Consumption
from node.ledger.assignment.pool import Pool
from node.ledger.settings import Settings
from node.ledger.terms import Terms

__all__ = ["room"]


def room(
    pool: Pool,
    settings: Settings,
    capacity: int,
    consumption: Consumption | None,
    session: str,
    n: int,
    part: str,
    terms: Terms,
) -> int:
    """How many groups of `n` samples of `part` the trainer of `session` should offer now, to keep the nodes busy and no
    more than that. `capacity`: sequences that the nodes can hold. `consumption`, `terms`: of the session; an evaluation
    and the training beside it do not take each other's room.

    Complete groups count until they are taken, so that they do not pile up for a trainer that is slow to take them.
    Each part that there is work of may have its share offered, whatever the others have.
    """
    cold = min(settings.cold_groups * n, settings.max_open_samples)
    wanted = settings.open_samples(capacity) if capacity else cold
    if terms.evaluates:
        return max(0, math.ceil((wanted - pool.held(session)) / n))
    short = wanted - pool.samples(session)
    if others := pool.parts - {part}:
        share = wanted / (1 + len(others)) - pool.samples_of(part) - pool.complete(session)
        short = max(short, min(share, settings.max_open_samples - pool.samples()))
    if consumption is not None and (most := consumption.most_open()) is not None:
        short = min(most + n, settings.max_open_samples) - pool.held(session) + consumption.hand
    return max(0, math.ceil(short / n))
