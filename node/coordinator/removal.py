"""Removes an adapter: publishes a version that makes its slot zeros, as if no adapter had ever been there."""

import numpy as np
import trio

from codec import BlockDelta
from codec.errors import UsageError
from codec.part_view import PartView
from node.coordinator.publisher import Publisher
from node.coordinator.slots import Slots
from node.coordinator.turns import Turns
from node.trainers.adapter_messages import AdapterRemoved
from swarm.runtime import in_thread

__all__ = ["remove_adapter"]

ABANDON_WITHIN_S = 10.0
"""To drop the open version."""


async def remove_adapter(publisher: Publisher, slots: Slots, turns: Turns, name: str, who: str) -> AdapterRemoved:
    """Publish the removal of the adapter `name`. `who`: the process that asks, in words.

    Raises `UsageError` when there is no such adapter, or a trainer is attached to it; `Busy`.
    """
    part = slots.adapters().get(name)
    if part is None:
        names = ", ".join(sorted(slots.adapters())) or "none"
        raise UsageError(f"This swarm has no adapter {name[:80]!r}; it has: {names}.")
    if slots.is_attached(name):
        raise UsageError(f"A trainer publishes the adapter {name!r}: end it, or have it close the swarm, first.")
    turn = await turns.take(part, who)
    try:
        attempt = await publisher.begin(part=part)
        try:
            view = publisher.view(part)
            deltas, changed = await in_thread(_zeros, view, publisher.seed.coder())
            await publisher.add(deltas)
            sealed = await publisher.end(changed, publisher.part_root)
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(ABANDON_WITHIN_S):
                await publisher.abandon()
            raise
    finally:
        turn.end()
    await slots.forget(name)
    return AdapterRemoved(attempt.epoch, attempt.version, sealed.root, sealed.payload_bytes)


def _zeros(view: PartView, coder: int) -> tuple[list[BlockDelta], int]:
    """The deltas that make a part zeros, and how many elements they change."""
    deltas: list[BlockDelta] = []
    changed = 0
    for block in range(view.layout.n_blocks):
        spec = view.layout.block(block)
        encoded = view.encode_changes(block, np.zeros(spec.count, spec.dtype.bits), coder)
        if encoded is not None:
            deltas.append(encoded.delta)
            changed += encoded.changed
    return deltas, changed
