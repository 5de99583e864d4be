"""Reads the routes of a group's samples: for trainers and for clients of the gateway. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from codec.errors import PeerError
from codec.routes import Routes, decode_routes, read_header
from node.engines.base import Version

__all__ = ["BadRoutes", "Routed", "read_routes", "read_sample"]


class BadRoutes(PeerError):
    """The routes of sample `index` cannot be read."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class Routed(NamedTuple):
    """What is needed of a sample to read its routes. `tokens`: how many it has. `first`: the version of the first."""

    routes: bytes
    prompt_routes: bytes
    tokens: int
    first: Version
    node: bytes = b""


def read_routes(samples: Sequence[Routed], prompt: int) -> list[Routes | None]:
    """The routes of each sample of a group; None where the group has none. See `read_sample`."""
    if not any(sample.routes for sample in samples):
        return [None] * len(samples)
    return [read_sample(samples, i, prompt) for i in range(len(samples))]


def read_sample(samples: Sequence[Routed], index: int, prompt: int) -> Routes:
    """The routes of sample `index` of a group, over its whole text but the last token, which no token was drawn after.

    uint16, (prompt + tokens - 1, layers, k). `prompt`: tokens of the prompt. A sample without routes of the prompt has
    those of the same version and node where possible, or of sample 0. Raises `BadRoutes`.
    """
    own = samples[index]
    having = [i for i, sample in enumerate(samples) if sample.prompt_routes]
    if not having:
        raise BadRoutes(0, "routes: none of the prompt")

    def distance(i: int) -> tuple[bool, bool, bool, int]:
        return i != index, own.first != samples[i].first, own.node != samples[i].node, i

    first = min(having, key=distance)
    before = _decoded(first, samples[first].prompt_routes, prompt - 1)
    return np.concatenate([before, _decoded(index, own.routes, own.tokens)])


def _decoded(index: int, data: bytes, tokens: int) -> Routes:
    try:
        return decode_routes(data, read_header(data)[0], tokens)  # the seed has compared the shape with the model's
    except PeerError as error:
        raise BadRoutes(index, str(error)) from error
