"""The ids of the driver's requests, by which the plugin knows them, and the name of their options. Both ends import it;
it needs nothing."""

__all__ = ["OPTIONS", "OURS", "scoring", "widest"]

OURS = "swarm-"
"""Ids of requests of the driver's that draw begin with it."""
OPTIONS = "swarm"
"""In SGLang's `custom_params`: the options of a request, as JSON of `swarm_vllm.messages.Options`."""
_SCORES = "swarm-score:"


def scoring(number: int, widest_top_p: float) -> str:
    """The id of a request to score. `widest_top_p`: the largest cut that rounding may have made."""
    return f"{_SCORES}{number}:{widest_top_p!r}"


def widest(rid: str) -> float | None:
    """`widest_top_p` of a request to score; None for another request. Raises `ValueError` for neither."""
    return float(rid.rpartition(":")[2]) if rid.startswith(_SCORES) else None
