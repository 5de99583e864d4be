"""The driver processes of a node's inference servers (vLLM, SGLang), as its settings name them."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.engines.device_plan import ANY_DEVICE, DevicePlan
from node.engines.process import EngineSpec
from node.host.child import python_module
from node.host.port import free_port

if TYPE_CHECKING:
    from node.settings.config import JoinConfig

__all__ = ["ServerSpec", "specs_of"]


@dataclass(frozen=True, slots=True)
class ServerSpec(EngineSpec):
    """How to start the driver of one server. `url`: of the server's OpenAI endpoint."""

    url: str


def specs_of(config: "JoinConfig", plan: DevicePlan | None = None) -> list[ServerSpec]:
    """One spec for each `engine_url`, or for each engine of `plan`. `config.engine`: "vllm" or "sglang".

    Without a plan the engines choose their devices themselves: `config.engines` of `config.tp` ranks, or one of one.
    """
    if config.engine_url:
        return [_spec(config, i, ["--url", url], url) for i, url in enumerate(config.engine_url)]
    plan = plan or DevicePlan(config.tp or 1, (ANY_DEVICE,) * (config.engines or 1))
    return [_started(config, i, plan) for i in range(len(plan.shares))]


def _started(config: "JoinConfig", i: int, plan: DevicePlan) -> ServerSpec:
    port = config.engine_port + i if config.engine_port else free_port()
    vllm = config.engine == "vllm"
    python, more = (config.vllm_python, config.vllm_arg) if vllm else (config.sglang_python, config.sglang_arg)
    flags = [f"--{config.engine}-python", str(python or sys.executable), "--port", str(port), "--tp", str(plan.ranks)]
    flags += ["--log", str(config.home / f"{config.engine}{_suffix(i)}.log")]
    if vllm:
        flags += ["--draft-tokens", str(config.draft_tokens)]
    if config.threads is not None:
        flags += ["--threads", str(max(1, config.threads // len(plan.shares)))]
    gpus, cores = plan.shares[i]
    if gpus:
        flags += ["--gpus", ",".join(gpus)]
    if cores:
        flags += ["--cores", ",".join(map(str, cores))]
    return _spec(config, i, flags, f"http://127.0.0.1:{port}", more)


def _spec(config: "JoinConfig", i: int, flags: list[str], url: str, more: tuple[str, ...] = ()) -> ServerSpec:
    name = f"engine{_suffix(i)}"
    path = config.home / f"{name}.sock"
    command = python_module(f"node.engines.{config.engine}.worker", "--socket", str(path), "--policy", config.running)
    return ServerSpec(path, (*command, *flags, "--", *more), config.home / f"{name}.log", url)


def _suffix(i: int) -> str:
    return str(i + 1) if i else ""
