"""How a request asks for routes of experts, and how they are told. Needs no vLLM."""

from typing import Any

import numpy as np

__all__ = ["ROUTES", "first_of", "split"]

ROUTES = "swarm_routes"
"""In a request's `extra_args`: the first position whose route is wanted."""


def first_of(params: Any) -> int | None:
    """The first position whose route a request wants; None: it wants none."""
    found = ((getattr(params, "extra_args", None) or {}) if params is not None else {}).get(ROUTES)
    return found if isinstance(found, int) and found >= 0 else None


def split(found: Any) -> tuple[bytes, int, int]:
    """(ids, a byte or two each; layers with experts; experts chosen) of an output's `routed_experts`.

    Dense layers have rows of one repeated id, and are left out.
    """
    ids = np.asarray(found)
    if ids.ndim == 3 and ids.shape[0] and ids.shape[2] > 1:
        ids = ids[:, (ids[:, :, 0] != ids[:, :, 1]).any(0)]
    kind = np.uint8 if not ids.size or ids.max() < 256 else np.uint16
    return ids.astype(kind).tobytes(), int(ids.shape[1]), int(ids.shape[2])
