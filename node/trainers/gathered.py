"""The whole tensors of a model that several ranks hold in parts, for `Swarm.publish`.

    tensors = whole_tensors(model)                              # on every rank: gathering is a collective
    publish_from_rank_0(swarm if rank == 0 else None, tensors, step=step)

For tensors that are sharded in a way that `Swarm.attach(model)` refuses, and for trainers that shard the model after
the swarm was attached. FSDP2's usual shards need none of this; see `docs/trainers.md`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from node.trainers.api import Publication, Swarm
from node.trainers.tensors.sharding import is_sharded

__all__ = ["in_parts", "publish_from_rank_0", "whole_tensors"]


def in_parts(model: Any) -> bool:
    """Whether this rank holds only its part of some parameter."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def whole_tensors(source: Any) -> Iterator[tuple[str, Any]]:
    """(name, whole tensor) of a model's state, or of a mapping of such tensors, in its order; a tied tensor once.

    Every rank iterates to the end: each sharded tensor is gathered by a collective.
    """
    state = source if isinstance(source, Mapping) else source.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, (tensor.full_tensor() if is_sharded(tensor) else tensor).detach()


def publish_from_rank_0(
    swarm: Swarm | None, tensors: Iterable[tuple[str, Any]], *, step: int, timeout_s: float = 600.0
) -> Publication | None:
    """Publish `tensors` from rank 0, whose `swarm` is attached; on the others it is None, and they only gather.

    Returns the publication, None on the other ranks. Raises what `Swarm.publish` raises, after the last tensor was
    gathered: the other ranks are then not left in a collective.
    """
    left = iter(tensors)
    try:
        return None if swarm is None else swarm.publish(left, step=step, timeout_s=timeout_s)
    finally:
        deque(left, maxlen=0)
