"""Signs finished samples, each with its reward if one was asked for, and keeps them until the ledger's verdict.

A sample whose reward is being computed counts as being generated: its lease is unfinished, and is given back with the
others.
"""

from collections.abc import Callable
from functools import partial

from codec.sign import Key
from node.engines.base import Completion
from node.engines.host import EngineFailed
from node.ledger.messages import RewardClaim, VersionSpan, seal_rollout
from node.ledger.rollout_parts import bodies_of
from node.member.lease_inventory import Held, LeaseInventory, Result
from node.member.reward_queue import RewardQueue
from node.member.rollout import rollout_of
from node.rewards.outcome import Outcome
from node.settings.event_log import EventLog

__all__ = ["Signing"]

_log = EventLog(__name__)


class Signing:
    """`wake()`: there is something to send."""

    def __init__(
        self,
        key: Key,
        inventory: LeaseInventory,
        rewards: RewardQueue,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._key, self._inventory, self._rewards, self._clock, self._wake = key, inventory, rewards, clock, wake

    def finish(self, held: Held, sample: int, completion: Completion, spans: tuple[VersionSpan, ...]) -> None:
        """A sample is drawn. Nothing happens for one that is not wanted: it was generated to fill its group, or its
        lease has ended. Raises `EngineFailed` when it is too large to be sent."""
        if sample not in held.drawing:
            return
        asked = held.message.sampling.extra.reward
        if asked is None or held.id not in self._inventory.leases:
            self._sign(held, sample, completion, spans, None)
            return
        self._rewards.compute(
            asked,
            held.prompt,
            completion.token_ids,
            lambda: self._inventory.leases.get(held.id) is held and sample in held.drawing,
            partial(self._rewarded, held, sample, completion, spans),
        )

    def _rewarded(
        self, held: Held, sample: int, completion: Completion, spans: tuple[VersionSpan, ...], outcome: Outcome
    ) -> None:
        try:
            if self._inventory.leases.get(held.id) is held and sample in held.drawing:
                self._sign(held, sample, completion, spans, RewardClaim(outcome.value, outcome.why))
        except EngineFailed as error:  # its lease expires, and the sample goes to another node
            _log.warning("lease_refused", lease=held.id, why=str(error))
        self._wake()

    def _sign(
        self,
        held: Held,
        sample: int,
        completion: Completion,
        spans: tuple[VersionSpan, ...],
        claim: RewardClaim | None,
    ) -> None:
        held.drawing.discard(sample)
        if held.id not in self._inventory.leases:
            return
        sealed = seal_rollout(self._key, rollout_of(held, sample, completion, spans, claim))
        try:
            bodies = bodies_of(held.id, sample, sealed)
        except ValueError as error:
            raise EngineFailed(str(error), poisoned=False) from error
        self._inventory.results[held.id, sample] = Result(bodies, held, self._clock())
