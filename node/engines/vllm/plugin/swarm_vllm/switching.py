"""The engine core's side of adapters: a prepared version becomes the served one, in one call between two steps.

Nothing is written then: the ranks have written and proven the version, and change a table. Requests of the base and of
other adapters are not touched.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from . import adapters, replays
from .core import compute_again, finish_batches, read_prompts_again, salt_waiting, stop, together
from .rank import drop_adapter_on, switch_adapter_on

__all__ = ["install"]


def install() -> None:
    """Add the calls to `EngineCore`. A second call does nothing."""
    EngineCore.swarm_switch_adapter = _switch  # type: ignore[attr-defined]
    EngineCore.swarm_drop_adapter = _drop  # type: ignore[attr-defined]


def _switch(core: Any, adapter: int, version: str, policy: str, renamed: bool) -> dict[str, Any]:
    """Returns {pause_s, loaded_s, error, touched}."""
    if getattr(core, "_swarm_version", None) is None or core.scheduler.pause_state != PauseState.UNPAUSED:
        return {"error": "the engine is closed", "touched": False}
    finish_batches(core)
    started = time.perf_counter()
    result = together(core, switch_adapter_on, adapter, version)
    if result["error"]:
        if result["touched"]:  # some ranks have switched, and others have not
            stop(core)
        return result
    if renamed:
        _abort(core, adapter)
    replays.abort_begun(core, adapter)
    if policy == "recompute":
        compute_again(core, lambda request: adapters.id_of(request) == adapter)
    read_prompts_again(core, adapter)
    adapters.versions(core)[adapter] = version
    adapters.name_weights(core)
    salt_waiting(core)
    return result | {"pause_s": time.perf_counter() - started}


def _drop(core: Any, adapter: int) -> dict[str, Any]:
    """Forget an adapter (0: all), and abort its requests."""
    finish_batches(core)
    _abort(core, adapter)
    result = together(core, drop_adapter_on, adapter)
    served = adapters.versions(core)
    for own in [adapter] if adapter else list(served):
        served.pop(own, None)
    if getattr(core, "_swarm_version", None) is not None:
        adapters.name_weights(core)
    return result | {"pause_s": 0.0}


def _abort(core: Any, adapter: int) -> None:
    names = [request.request_id for request in adapters.requests_of(core, adapter)]
    if names:
        core._send_abort_outputs(core.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED))
