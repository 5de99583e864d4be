"""The engine core's knowledge of adapters: which request is of which, and which version of each is served."""

from typing import Any

from .labels import all_of

__all__ = ["id_of", "name_weights", "requests_of", "versions"]


def id_of(request: Any) -> int:
    """The id of the request's adapter; 0: none."""
    asked = getattr(request, "lora_request", None)
    return 0 if asked is None else int(asked.lora_int_id)


def versions(core: Any) -> dict[int, str]:
    """The version of each adapter that is served, by id."""
    return core.__dict__.setdefault("_swarm_adapters", {})


def name_weights(core: Any) -> None:
    """Tokens of the next steps get the name of the weights that are live now."""
    core._weight_version = all_of(core._swarm_version, versions(core))


def requests_of(core: Any, adapter: int) -> list[Any]:
    """The requests of an adapter that are not finished; 0: those of all adapters."""
    return [
        request
        for request in core.scheduler.requests.values()
        if (own := id_of(request)) and (not adapter or own == adapter)
    ]
