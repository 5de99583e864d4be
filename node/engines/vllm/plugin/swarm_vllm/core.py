"""The engine core's side: changes of weights, version name and prefix cache, in one call between two steps.

`install` adds five calls to vLLM's `EngineCore`, and salts the prefix cache by version. The core's loop carries out
calls one by one between its steps, so no token is sampled during a call. Bits, version name and cache change together,
or the core stops.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from . import adapters, replays, routes
from .images import forget_encoded
from .rank import check_on, commit_on, load_on
from .routed import first_of
from .waiting import sleep_between_reads

__all__ = [
    "add_request",
    "compute_again",
    "finish_batches",
    "install",
    "read_prompts_again",
    "salt_waiting",
    "stop",
    "together",
]

_original_add = EngineCore.add_request


def install() -> None:
    """Add the calls to `EngineCore`. A second call does nothing."""
    if EngineCore.add_request is _original_add:
        EngineCore.add_request = add_request
        EngineCore.swarm_commit = _commit  # type: ignore[attr-defined]
        EngineCore.swarm_load = _load  # type: ignore[attr-defined]
        EngineCore.swarm_check = _check  # type: ignore[attr-defined]
        EngineCore.swarm_open = _open  # type: ignore[attr-defined]
        EngineCore.swarm_close = _close  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the prefix cache


def add_request(core: Any, request: Request, request_wave: int = 0) -> None:
    """Add a request to the scheduler."""
    replays.begin(core, request)
    if first_of(request.sampling_params) is not None:
        routes.follow(core)
    _salt(core, request)
    _original_add(core, request, request_wave)


def _salt(core: Any, request: Request) -> None:
    """Let the request find, and leave, only cached prefixes that the present weights computed.

    A request that came before the version must be salted again before it is computed from its first token.
    """
    version = getattr(core, "_swarm_version", None)
    if version is None:
        return
    if adapter := adapters.id_of(request):
        version = f"{version}/{adapters.versions(core).get(adapter, '')}"
    own = getattr(request, "_swarm_own_salt", None)
    if own is None:
        own = request._swarm_own_salt = request.cache_salt or ""  # type: ignore[attr-defined]
    request.cache_salt = f"{own}|swarm:{version}"
    request.block_hashes.clear()
    request.update_block_hashes()


def _set_version(core: Any, version: str) -> None:
    """The weights are `version` now: later tokens get this name, and requests without any computation this salt."""
    replays.abort_begun(core)
    read_prompts_again(core)
    forget_encoded(core)
    core._swarm_version = version
    adapters.name_weights(core)
    salt_waiting(core)


def compute_again(core: Any, which: Callable[[Request], bool]) -> None:
    """Have the running requests of `which` computed again from their first token, as vLLM does it for all of them."""
    scheduler, now = core.scheduler, time.monotonic()
    chosen = [request for request in scheduler.running if which(request)]
    if chosen:
        scheduler.running = [request for request in scheduler.running if request not in chosen]
    for request in reversed(chosen):
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def read_prompts_again(core: Any, adapter: int = 0) -> None:
    """Have prompts that are being scored read again: other weights have read a part of them. `adapter`: only those of
    its requests; 0: all, because the base changed."""

    def begun(request: Request) -> bool:
        params = request.sampling_params
        scored = params is not None and params.prompt_logprobs is not None and not request.num_output_tokens
        return scored and adapter in (0, adapters.id_of(request))

    compute_again(core, begun)


def salt_waiting(core: Any) -> None:
    """Salt the requests without any computation again."""
    for request in core.scheduler.requests.values():
        if request.status != RequestStatus.RUNNING and request.num_computed_tokens == 0:
            _salt(core, request)


# ---------------------------------------------------------------- calls


def _commit(core: Any, version: str, policy: str, dense: list) -> Any:
    """Write the staged changes on every rank and become `version`.

    Returns {pause_s, loaded_s, error, touched}, or a future of it. `dense`: tensors to load whole.
    """
    if core.scheduler.pause_state != PauseState.UNPAUSED:
        return {"error": "the engine is closed", "touched": False}
    if policy == "drain":
        drained = core.pause_scheduler("wait", clear_cache=False)
        if drained is not None:
            done: Future[Any] = Future()
            drained.add_done_callback(lambda _: done.set_result(_commit_drained(core, version, dense)))
            return done
        return _commit_drained(core, version, dense)
    return _commit_now(core, version, policy, dense)


def _commit_drained(core: Any, version: str, dense: list) -> dict[str, Any]:
    result = _commit_now(core, version, "drain", dense)
    if not result["touched"] or not result["error"]:
        core.resume_scheduler()
    return result


def _commit_now(core: Any, version: str, policy: str, dense: list) -> dict[str, Any]:
    finish_batches(core)
    started = time.perf_counter()
    result = together(core, commit_on, version, tuple(dense))
    if result["error"]:
        if result["touched"]:
            stop(core)
        return result
    if policy == "recompute":
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
    _set_version(core, version)
    return result | {"pause_s": time.perf_counter() - started}


def _load(core: Any, names: Any) -> Any:
    """Load tensors (None: all) from the replica on every rank, and pause: running requests wait until `_open`."""
    finish_batches(core)
    if core.scheduler.pause_state == PauseState.UNPAUSED:
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    started = time.perf_counter()
    result = together(core, load_on, None if names is None else tuple(names))
    return result | {"pause_s": time.perf_counter() - started}


def _check(core: Any, names: list) -> Any:
    """Check that loading these tensors again leaves what their first load left. Stops the core when it does not."""
    finish_batches(core)
    started = time.perf_counter()
    result = together(core, check_on, tuple(names))
    if result["error"]:
        stop(core)
    return result | {"pause_s": time.perf_counter() - started}


def _open(core: Any, version: str) -> None:
    sleep_between_reads()
    core.scheduler.reset_prefix_cache(reset_running_requests=True)
    _set_version(core, version)
    core.resume_scheduler()


def _close(core: Any) -> None:
    finish_batches(core)
    stop(core)


def together(core: Any, call: Any, *args: Any, within_s: float | None = None) -> dict[str, Any]:
    """Call every rank. Returns their outcomes as one. Raises `TimeoutError` after `within_s`."""
    try:
        answers = core.model_executor.collective_rpc(call, timeout=within_s, args=args)
    except TimeoutError:
        raise
    except Exception as error:  # a worker died, and the core has not noticed yet
        return {"error": f"a worker failed: {error}", "touched": True}
    bad = [answer["error"] for answer in answers if answer["error"]]
    touched = any(answer["touched"] for answer in answers)
    if bad:
        return {"error": "; ".join(sorted(set(bad))), "touched": touched}
    return {"error": "", "touched": touched, "loaded_s": max(answer["loaded_s"] for answer in answers)}


def stop(core: Any) -> None:
    """Abort the running requests, which could see a mix of versions, and pause the scheduler."""
    core._send_abort_outputs(core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)


def finish_batches(core: Any) -> None:
    """Take in the output of every running batch, so that its tokens get the name of the version before."""
    while core.batch_queue:
        future, scheduled, executed = core.batch_queue.pop()
        output = future.result()
        if output is None:
            executed.result()
            raise RuntimeError("a step gave no output")
        outputs = core.scheduler.update_from_output(scheduled, output)
        core._attach_weight_version(outputs)
        for item in outputs.items():
            core.output_queue.put_nowait(item)
