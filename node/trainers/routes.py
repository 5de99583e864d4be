"""Routes of experts in the trainer's process: read from samples, and replayed in the trainer's model.

A rollout of the swarm says which experts each token took in the engine. Where the trainer's own routers would choose
others, because it rounds otherwise or its weights have moved on, `replayed_routes` makes its model take those of the
engine, with weights from its own router logits: rollout routing replay, R3 (Ma et al. 2025, arXiv:2510.11370).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.errors import PeerError, UsageError
from codec.routes import Routes, decode_routes, read_header
from node.engines.base import Completion, Version
from node.trainers.messages import Sample

if TYPE_CHECKING:
    import torch

__all__ = ["BadRoutes", "Routed", "padded_routes", "read_routes", "replayed_routes"]


class BadRoutes(PeerError):
    """The routes of sample `index` cannot be read."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class Routed(NamedTuple):
    """What `read_routes` needs of a sample. `first`: the version of its first token. `tokens`: how many it has."""

    routes: bytes
    prompt_routes: bytes
    tokens: int
    first: Version
    node: bytes = b""

    @classmethod
    def of(cls, sample: Sample | Completion) -> "Routed":
        """Of a sample from the seed, or a completion of an engine in this process."""
        if isinstance(sample, Completion):
            tokens = len(sample.token_ids)
            return cls(sample.routes, sample.prompt_routes, tokens, sample.spans[0].version)
        epoch, version, _ = sample.spans[0]
        tokens = len(sample.token_ids) // 4
        return cls(sample.routes, sample.prompt_routes, tokens, (epoch, version), sample.node)


def read_routes(samples: Sequence[Routed], prompt: int) -> list[Routes | None]:
    """The routes of each sample of a group, over its whole text but the last token, which no token was drawn after.

    uint16, (prompt + tokens - 1, layers, k); None where the group has none. `prompt`: tokens of the prompt. A sample
    without routes of the prompt has those of the same node and version, or of sample 0. Raises `BadRoutes`.
    """
    if not any(sample.routes for sample in samples):
        return [None] * len(samples)
    firsts: dict[int, Routes] = {}
    for i, sample in enumerate(samples):
        if sample.prompt_routes:
            firsts[i] = _decoded(i, sample.prompt_routes, prompt - 1)
    return [
        np.concatenate([firsts[_first_for(i, samples, firsts)], _decoded(i, sample.routes, sample.tokens)])
        for i, sample in enumerate(samples)
    ]


def _decoded(index: int, data: bytes, tokens: int) -> Routes:
    try:
        return decode_routes(data, read_header(data)[0], tokens)  # the seed has compared the shape with the model's
    except PeerError as error:
        raise BadRoutes(index, str(error)) from error


def _first_for(index: int, samples: Sequence[Routed], firsts: dict[int, Routes]) -> int:
    """The sample whose routes of the prompt are nearest to those of sample `index`."""
    if not firsts:
        raise BadRoutes(0, "routes: none of the prompt")

    def distance(other: int) -> tuple[bool, bool, bool, int]:
        one, two = samples[index], samples[other]
        return other != index, one.first != two.first, one.node != two.node, other

    return min(firsts, key=distance)


def padded_routes(routes: Sequence[Routes], width: int) -> NDArray[np.int64]:
    """The routes of texts that are padded on the right to `width` tokens: int64, (texts, width, layers, k).

    Where a text has no route (its last token, and padding) there is -1: the router chooses by itself.
    """
    out = np.full((len(routes), width, *routes[0].shape[1:]), -1, np.int64)
    for row, ids in zip(out, routes, strict=True):
        row[: len(ids)] = ids
    return out


@contextmanager
def replayed_routes(model: Any, routes: "NDArray[Any] | torch.Tensor") -> Iterator[None]:
    """In this block, forward and backward passes of `model` take these experts, with weights from its own routers.

    `model`: a mixture of experts of `transformers`. `routes`: integers, (texts, positions, layers, k), for the batch
    that is read in the block, as `padded_routes` makes them; -1 where a router chooses by itself. The choice itself has
    no gradient, as without replay.

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
