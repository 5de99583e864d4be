"""SGLang's process, started with the plugin. It gets the swarm's config and tokenizer files; its weights come from the
replica, after it has started with made-up ones."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.engines.device_plan import ANY_DEVICE, DeviceShare, cores_of_ranks
from node.engines.server_process import ServerProcess
from node.engines.sglang.installed import Installed
from node.engines.sglang.plugin.swarm_sglang.calls import LOADER
from node.engines.vllm.server import SERVED_NAME

__all__ = ["CPU_FLAGS", "Server", "ServerOptions", "environment", "flags"]

CPU_TOKENS: Final = 16384
"""Tokens of the cache on CPUs, where SGLang would take most of the machine's memory."""
CPU_FLAGS: Final = ("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", str(CPU_TOKENS))
"""Without which the released wheel serves nothing on a CPU."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to start one SGLang.

    `port`: of its endpoint, on loopback. `ranks`: tensor-parallel ranks. `threads`: of all ranks together, on CPUs.
    `devices`: its GPUs, or its cores where engines share them. `flags`: more of SGLang's own flags, and `--rows-alike`
    (`plugin.swarm_sglang.alike`).
    """

    port: int
    ranks: int = 1
    threads: int | None = None
    devices: DeviceShare = ANY_DEVICE
    flags: tuple[str, ...] = ()


class Server(ServerProcess):
    """An SGLang process and its children."""

    program = "SGLang"

    def __init__(self, where: Installed, folder: Path, log: Path, options: ServerOptions) -> None:
        """`folder`: config and tokenizer. Raises `UsageError` when the port is taken."""
        own = flags(folder, options.port, options.ranks, where.cpu)
        command = [str(where.python), "-m", "swarm_sglang.serve", *own, *options.flags]
        env = environment(os.environ, options.ranks, where.cpu, options.threads, options.devices)
        super().__init__(command, env, options.port, log)


def flags(folder: Path, port: int, ranks: int, cpu: bool) -> list[str]:
    """SGLang's flags for an engine that takes its weights from a replica."""
    out = ["--model-path", str(folder), "--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
    out += ["--load-format", "dummy", "--custom-weight-loader", LOADER]
    out += ["--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle", "--incremental-streaming-output"]
    out += ["--tp-size", str(ranks)] if ranks > 1 else []
    return [*out, *CPU_FLAGS] if cpu else out


def environment(
    ours: Mapping[str, str], ranks: int, cpu: bool, threads: int | None = None, devices: DeviceShare = ANY_DEVICE
) -> dict[str, str]:
    """The environment variables of an SGLang that is to be started: it uses no network, and what the user set stays.

    `ours`: this process's environment. `threads`: CPU threads of all ranks together, where several engines share.
    `devices`: its GPUs; or cores, of which the number counts: the released wheel binds no threads to them.
    """
    env = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        cores = devices.cores or sorted(os.sched_getaffinity(0))
        env |= {"OMP_NUM_THREADS": str(max(1, (threads or len(cores)) // ranks))}
        if ranks > 1:  # otherwise SGLang asks for a NUMA node a rank
            env |= {"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(cores, ranks)}
        if threads is not None or devices.cores:
            ours = {name: value for name, value in ours.items() if name != "OMP_NUM_THREADS"}
    elif devices.gpus:
        ours = {**ours, "CUDA_VISIBLE_DEVICES": ",".join(devices.gpus)}
    return env | {name: value for name, value in ours.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
