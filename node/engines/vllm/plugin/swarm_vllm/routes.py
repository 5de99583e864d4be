"""Routes of experts on CPUs: which experts each token took, told with the end of a request.

vLLM's own option for it (`--enable-return-routed-experts`) needs the model runner of GPUs. Here the model runner of
CPUs keeps what the routers chose in each step, and the scheduler passes it on as it does with that option. So the front
reads the same field of an output on CPUs and GPUs. Requests that do not carry `ROUTES` cost nothing.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from .routed import first_of

__all__ = ["follow", "install"]

_execute_original = GPUModelRunner.execute_model
_sample_original = GPUModelRunner.sample_tokens


def install() -> None:
    """Change the model runners of this process. A second call does nothing."""
    GPUModelRunner.execute_model = _execute
    GPUModelRunner.sample_tokens = _sample


# ---------------------------------------------------------------- in the model runner


class _Captured:
    """What the routers chose in a step: by layer, int64, (tokens, k). `wanted`: some request wants it."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self.wanted = False
        self.layers: list[torch.Tensor | None] = []
        self.pending: dict[str, list[np.ndarray]] = {}
        """Of prompts that are read in several steps."""
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                self.layers.append(None)
                module.router.set_capture_fn(partial(self._keep, len(self.layers) - 1))

    def _keep(self, layer: int, ids: torch.Tensor) -> None:
        if self.wanted:
            self.layers[layer] = ids.clone()

    def take(self, tokens: int) -> np.ndarray:
        """Of the step: uint16, (tokens, layers, k). Raises `RuntimeError` where a layer was not computed."""
        if any(ids is None for ids in self.layers):
            raise RuntimeError("a layer's routes were not captured")
        kept = torch.stack([ids[:tokens] for ids in self.layers if ids is not None], 1)
        self.layers = [None] * len(self.layers)
        return kept.to(torch.int32).numpy().astype(np.uint16)


def _execute(runner: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
    new = [request.sampling_params for request in scheduler_output.scheduled_new_reqs]
    wanted = any(first_of(params) is not None for params in new) or any(
        first_of(runner.requests[name].sampling_params) is not None
        for name in scheduler_output.scheduled_cached_reqs.req_ids
        if name in runner.requests
    )
    captured = getattr(runner, "_swarm_routes", None)
    if wanted and captured is None:
        captured = runner._swarm_routes = _Captured(runner)
    if captured is not None:
        captured.wanted = wanted
        for name in scheduler_output.finished_req_ids:
            captured.pending.pop(name, None)
    return _execute_original(runner, scheduler_output, *more, **named)


def _sample(runner: Any, *more: Any, **named: Any) -> Any:
    captured, state = getattr(runner, "_swarm_routes", None), runner.execute_model_state
    if captured is None or not captured.wanted or state is None:
        return _sample_original(runner, *more, **named)
    found = _by_request(runner, captured, state[0].num_scheduled_tokens)
    output = _sample_original(runner, *more, **named)
    getattr(output, "_model_runner_output", output).aux_output_connector_output = found
    return output


def _by_request(runner: Any, captured: _Captured, scheduled: dict[str, int]) -> dict[str, Any]:
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

    names = list(runner.input_batch.req_ids)
    ids, at, found = captured.take(sum(scheduled[name] for name in names)), 0, {}
    for i, name in enumerate(names):
        rows, at = ids[at : at + scheduled[name]], at + scheduled[name]
        request = runner.requests[name]
        start = int(runner.input_batch.num_computed_tokens_cpu[i])
        if (first := first_of(request.sampling_params)) is None:
            continue
        if start == 0:
            captured.pending.pop(name, None)  # it is read again from its beginning
        end, kept = start + len(rows), captured.pending.pop(name, [])
        kept.append(rows[max(0, first - start) :])
        if end < request.num_prompt_tokens:
            captured.pending[name] = kept
        else:
            together = np.concatenate(kept)
            found[name] = AuxRequestOutput(end - len(together), together)
    return found


# ---------------------------------------------------------------- in the scheduler


class Passing:
    """Takes the place of vLLM's connector for auxiliary outputs: it passes on what the model runner found."""

    def build_connector_meta(self, *_: Any) -> None:
        """Nothing goes to the worker."""

    def request_finished(self, request: Any) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""

    def take_output(self, request: Any, output: Any) -> Any:
        """The routes of the positions before the request's last token that were not told yet; None: there are none."""
        first = first_of(request.sampling_params)
        mine = (output or {}).get(request.request_id)
        if first is None or mine is None:
            return None
        told = getattr(request, "_swarm_told", first)
        end = request.num_tokens - 1
        if told < mine.token_start or end > mine.token_start + len(mine.rows):
            return None  # the front misses them
        request._swarm_told = end
        return mine.rows[told - mine.token_start : end - mine.token_start]


def follow(core: Any) -> None:
    """Let the scheduler of this engine core pass routes on, unless vLLM's own option does."""
    if getattr(core.scheduler, "aux_output_connector", None) is None:
        core.scheduler.aux_output_connector = Passing()
