"""Routes of experts replayed in the trainer's model.

A rollout of the swarm says which experts each token took in the engine. Where the trainer's own routers would choose
others, because it rounds otherwise or its weights have moved on, `replayed_routes` makes its model take those of the
engine, with weights from its own router logits: rollout routing replay, R3 (Ma et al. 2025, arXiv:2510.11370).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError
from codec.routes import Routes

if TYPE_CHECKING:
    pass

__all__ = ["padded_routes", "replayed_routes"]


def padded_routes(routes: Sequence[Routes], width: int) -> NDArray[np.int64]:
    """The routes of texts that are padded on the right to `width` tokens: int64, (texts, width, layers, k).

    Where a text has no route (its last token, and padding) there is -1: the router chooses by itself.
    """
    out = np.full((len(routes), width, *routes[0].shape[1:]), -1, np.int64)
    for row, ids in zip(out, routes, strict=True):
        row[: len(ids)] = ids
    return out


@contextmanager
def replayed_routes(model: Any, routes: Any) -> Iterator[None]:
    """In this block, forward and backward passes of `model` take these experts, with weights from its own routers.

    `model`: a mixture of experts of `transformers`. `routes`: integers, (texts, positions, layers, k), as an array or a
    tensor, for the batch that is read in the block, as `padded_routes` makes them; -1 where a router chooses by itself.
    The choice itself has no gradient, as without replay.

    Raises `UsageError` when the model has no experts, or other ones; `ValueError`, in the forward, for a batch of
    another size, and for a family whose routers do not choose by `topk`.
    """
    import torch

    from node.engines.routing import forced, route_shape

    shape = route_shape(model)
    if shape is None:
        raise UsageError("replayed_routes: this model has no experts, or not the same number in each layer.")
    ids = torch.as_tensor(routes).long()
    if ids.ndim != 4 or tuple(ids.shape[2:]) != (shape.layers, shape.chosen):
        raise UsageError(
            f"replayed_routes: the routes have shape {tuple(ids.shape)}; this model needs (texts, positions, "
            f"{shape.layers}, {shape.chosen})."
        )
    if ids.numel() and not (int(ids.min()) >= -1 and int(ids.max()) < shape.experts):
        raise UsageError(f"replayed_routes: an expert outside 0 to {shape.experts - 1}, which this model has.")
    with forced(model, ids, shape):
        yield
