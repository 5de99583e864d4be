"""The engine core's side of scores under the version before: one rewind, between two steps, for all that ask.

A request that carries `PREVIOUS` waits in the core, outside the scheduler. The call `swarm_previous` undoes the last
commit on every rank, runs the waiting requests alone, and writes the live bits back, which each rank proves. Other
requests keep their keys and values, and do not step meanwhile. Any failure in between stops the core.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import logging
import os
import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from . import adapters
from . import core as calls
from .rank import BUSY, redo_on, undo_on

__all__ = ["LABEL", "PREVIOUS", "install"]

PREVIOUS = "swarm_previous"
"""In a request's `extra_args`."""
LABEL = "-previous"
"""Follows the live version's name in the name of the version before: in requests' spans and prefixes' salts."""
_MOST_WAITING = 64
"""Requests that wait for a rewind. The front sends eight at most; one more is a user's own, and runs at once."""
_RESTORE_WITHIN_S = 30.0
"""For the ranks to write the live bits back, which takes milliseconds."""
_QUEUES = ("waiting", "kv_holding_waiting")
"""The scheduler's queues of requests that do not run. Releases of vLLM differ."""

_log = logging.getLogger(__name__)


def install() -> None:
    """Add the call to `EngineCore`. A second call does nothing."""
    if not hasattr(EngineCore, "swarm_previous"):
        EngineCore.add_request = _hold_or_add
        EngineCore.swarm_previous = _score_previous  # type: ignore[attr-defined]


def _waiting(core: Any) -> list[Any]:
    return core.__dict__.setdefault("_swarm_waiting", [])


def _hold_or_add(core: Any, request: Any, request_wave: int = 0) -> None:
    if not _hold(core, request):
        calls.add_request(core, request, request_wave)


def _hold(core: Any, request: Any) -> bool:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    if PREVIOUS not in extra or getattr(core, "_swarm_version", None) is None or len(_waiting(core)) >= _MOST_WAITING:
        return False
    _waiting(core).append(request)
    return True


def _score_previous(core: Any, last: bool) -> dict[str, Any]:
    """Run the waiting requests under the version before. Returns {pause_s, loaded_s, error, touched}.

    Without `last`, they go on waiting if another thread reads the live weights.
    """
    asked, core._swarm_waiting = _waiting(core), []
    if not asked:
        return {"error": "", "touched": False, "pause_s": 0.0, "loaded_s": 0.0}
    if core.scheduler.pause_state != PauseState.UNPAUSED:
        core._send_abort_outputs(asked)
        return {"error": "the engine is closed", "touched": False}
    calls.finish_batches(core)
    started = time.perf_counter()
    result = calls.together(core, undo_on)
    undone, failed = not result["error"], result["error"] if result["touched"] else ""
    if undone:
        try:
            _run_alone(core, asked)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
    restored = _restore(core)
    if failed := failed or restored:
        calls.stop(core)
        core._send_abort_outputs(asked)
        return {"error": f"tokens were scored under the version before, and that failed: {failed}", "touched": True}
    if undone:
        return result | {"touched": False, "pause_s": time.perf_counter() - started}
    if BUSY in result["error"] and not last:
        core._swarm_waiting = asked
    else:
        core._send_abort_outputs(asked)
    return result


def _restore(core: Any) -> str:
    """Make the version live again on every rank. Returns the error, or an empty text.

    A rank that waits in a step for another one, which failed, never answers. vLLM cannot go on then, and ends.
    """
    try:
        return calls.together(core, redo_on, within_s=_RESTORE_WITHIN_S)["error"]
    except TimeoutError:
        _log.critical("a rank did not answer after tokens were scored under the version before: vLLM ends")
        os._exit(1)


def _run_alone(core: Any, asked: list[Any]) -> None:
    """Step until these requests are done, and no others run. Those for which there is no room are aborted."""
    scheduler, version = core.scheduler, core._swarm_version
    aside = _set_aside(scheduler)
    names = {request.request_id for request in asked}
    try:
        core._swarm_version = version + LABEL
        adapters.name_weights(core)
        for request in asked:
            calls.add_request(core, request)
        while names & scheduler.requests.keys():
            outputs, executed = core.step_fn()
            for output in (outputs or {}).items():
                core.output_queue.put_nowait(output)
            core.post_step(executed)
            if not executed and not core.batch_queue:
                break
        calls.finish_batches(core)
        left = names & scheduler.requests.keys()
        core._send_abort_outputs(scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED))
    finally:
        _put_back(scheduler, aside)
        core._swarm_version = version
        adapters.name_weights(core)


def _set_aside(scheduler: Any) -> dict[str, Any]:
    aside = {name: getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)}
    for name, queue in aside.items():
        setattr(scheduler, name, type(queue)())
    aside["running"], scheduler.running = scheduler.running, []
    return aside


def _put_back(scheduler: Any, aside: dict[str, Any]) -> None:
    """Put the requests back that were not aborted meanwhile; requests of the rewind that remain are added to them."""
    running = aside.pop("running")
    scheduler.running = [request for request in running if not request.is_finished()] + scheduler.running
    for name, queue in aside.items():
        queue.remove_requests([request for request in queue if request.is_finished()])
        for request in getattr(scheduler, name):
            queue.add_request(request)
        setattr(scheduler, name, queue)
