"""Routes of experts in rollouts: what a model's routes look like, and which rollouts have the routes asked for. Pure.

A group whose sampling has `SamplingOptions.routes` gets with each rollout the routes of its tokens. Those of the
prompt, which all samples share, come once a lease: with its first sample. So sample 0 always has them.

The seed reads the header of coded routes, whose cost does not depend on their length. Whoever uses routes decodes them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from codec import Layout
from codec.errors import PeerError
from codec.routes import RouteShape, most_bytes, read_header
from node.ledger.messages import MAX_ROLLOUT_BYTES, Rollout
from node.ledger.model_limits import config_of, number_in
from node.ledger.state import Group

__all__ = ["has_routes_as_asked", "layers_with_routers", "route_shape_of", "why_no_routes"]

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names that model families give to the number of experts of a layer."""
CHOSEN: Final = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts")
"""The same for how many of them a token takes."""
_ROUTER: Final = re.compile(r"\.(gate|router)(\.(layer|proj|classifier|gate))?\.weight$")
"""A router's weight, in a checkpoint's names."""
REST_BYTES: Final = 16 << 10
"""Of a sealed rollout, besides tokens, log-probabilities and routes: 64 spans have 4 KiB."""


def route_shape_of(files: Mapping[str, bytes], layout: Layout) -> RouteShape | None:
    """The shape of a model's routes, by its config.json and its tensors; None for a dense model, and for one whose
    config names no experts. `files`: the small files of the checkpoint."""
    config = config_of(files)
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        experts, chosen = _first(part, EXPERTS), _first(part, CHOSEN)
        if experts is not None and chosen is not None:
            names = ((tensor.name, tensor.shape) for tensor in layout.tensors)
            shape = RouteShape(layers_with_routers(names, experts), chosen, experts)
            return shape if shape.possible else None
    return None


def layers_with_routers(tensors: Iterable[tuple[str, tuple[int, ...]]], experts: int) -> int:
    """How many of these (name, shape) are the weight of a router over so many experts."""
    return sum(len(shape) == 2 and shape[0] == experts and bool(_ROUTER.search(name)) for name, shape in tensors)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((found for name in names if (found := number_in(config, name))), None)


def why_no_routes(shape: RouteShape | None, prompt: int, max_tokens: int) -> str | None:
    """Why samples of `max_tokens` tokens after `prompt` tokens cannot have routes, in a sentence; None: they can."""
    if shape is None:
        return "routes: this model has no experts whose choice could be recorded. Ask without routes."
    most = 8 * max_tokens + most_bytes(shape, max_tokens) + most_bytes(shape, max(0, prompt - 1)) + REST_BYTES
    if most <= MAX_ROLLOUT_BYTES:
        return None
    return (
        f"routes: those of {prompt + max_tokens:,} tokens may take {most / 2**20:.0f} MiB, and a sample has at most "
        f"{MAX_ROLLOUT_BYTES >> 20} MiB: ask for fewer tokens, or without routes."
    )


def has_routes_as_asked(rollout: Rollout, group: Group, shape: RouteShape | None) -> bool:
    """Whether `rollout` has routes if its group asks for them, of the model's `shape`, and none otherwise."""
    if not group.sampling.extra.routes:
        return not rollout.routes and not rollout.prompt_routes
    if shape is None or (not rollout.prompt_routes and rollout.sample == 0):
        return False
    prompt = len(group.prompt) // 4 - 1
    try:
        own = read_header(rollout.routes) == (shape, rollout.length)
        return own and (not rollout.prompt_routes or read_header(rollout.prompt_routes) == (shape, prompt))
    except PeerError:
        return False
