"""The whole tensors of a model that several ranks hold in parts, for `Swarm.publish`.

    tensors = whole_tensors(model)                              # on every rank: gathering is a collective
    publish_from_rank_0(swarm if rank == 0 else None, tensors, step=step)

For DeepSpeed's ZeRO stage 3, and for tensors that are sharded in a way that `Swarm.attach(model)` refuses: one layer is
whole at a time. FSDP2's usual shards need none of this; see `docs/trainers.md`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from node.trainers.api import Publication, Swarm
from node.trainers.tensors.sharding import is_sharded

__all__ = ["in_parts", "publish_from_rank_0", "whole_tensors"]


def in_parts(model: Any) -> bool:
    """Whether this rank holds only its part of some parameter."""
    return any(_of_zero3(parameter) or is_sharded(parameter) for parameter in model.parameters())


def whole_tensors(source: Any) -> Iterator[tuple[str, Any]]:
    """(name, whole tensor) of a model's state, or of a mapping of such tensors, in its order; a tied tensor once.

    Every rank iterates to the end: each layer is gathered by a collective. A tensor is whole until the next one of
    another layer is asked for.
    """
    seen: set[int] = set()
    state = source if isinstance(source, Mapping) else source.state_dict(keep_vars=True)
    for _, layer in groupby(state.items(), key=lambda item: item[0].rpartition(".")[0]):
        tensors = {name: tensor for name, tensor in layer if id(tensor) not in seen}
        seen |= set(map(id, tensors.values()))
        parts = [tensor for tensor in tensors.values() if _of_zero3(tensor)]
        if not parts:
            yield from ((name, _whole(tensor).detach()) for name, tensor in tensors.items())
            continue
        from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]

        with GatheredParameters(parts):
            yield from ((name, _whole(tensor).detach()) for name, tensor in tensors.items())


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


def _of_zero3(tensor: Any) -> bool:
    return hasattr(tensor, "ds_id")


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if is_sharded(tensor) else tensor
