"""vLLM's process: started with the plugin and stopped; or attached to by its URL when the user runs it.

vLLM lives in an environment of its own, named by its Python. A vLLM that is started here gets the swarm's config and
tokenizer files; its weights come from the replica.
"""

import http.client
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from codec.errors import UsageError
from node.engines.device_plan import ANY_DEVICE, DeviceShare, cores_of_ranks
from node.engines.server_process import ASK_WITHIN_S, LOOK_EVERY_S, ServerProcess
from node.engines.vllm.causes import cause_of, last_error, quantization_of
from node.engines.vllm.installed import PLUGIN, Installed
from node.engines.vllm.speculation import DraftModel

__all__ = ["Server", "ServerOptions", "attach_to", "environment", "flags"]

SERVED_NAME: Final = "policy"
"""The model's name in vLLM's OpenAI API."""
HUNG_UP_WITHIN_S: Final = 20.0
"""For a vLLM to notice that its driver disconnected: the driver that is still attached may be this node's previous
one."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to start one vLLM.

    `port`: of its OpenAI endpoint, on loopback. `ranks`: tensor-parallel ranks. `threads`: of all ranks together, on
    CPUs. `devices`: its GPUs, or its cores where engines share them. `flags`: more of vLLM's own flags. `env`: more of
    its environment. `draft_tokens`: that a draft model proposes at a time.
    """

    port: int
    ranks: int = 1
    threads: int | None = None
    devices: DeviceShare = ANY_DEVICE
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    draft_tokens: int = 3


class Server(ServerProcess):
    """A vLLM process and its children."""

    program = "vLLM"

    def __init__(
        self,
        where: Installed,
        folder: Path,
        log: Path,
        socket: Path,
        options: ServerOptions,
        draft: DraftModel | None = None,
    ) -> None:
        """`folder`: config and tokenizer. `socket`: where vLLM gets its weights. `draft`: the model by which it is
        to propose tokens. Raises `UsageError` when the port is taken."""
        self._quantization = quantization_of(options.flags, _config_of(folder))
        command = [
            str(where.python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            *flags(folder, options.port, socket, options.ranks, where.cpu, draft),
            *drafting(draft, options),
            *options.flags,
        ]
        env = environment(os.environ, options.ranks, where.cpu, options.threads, options.devices)
        super().__init__(command, env | dict(options.env), options.port, log)

    def cause_of(self, log: str) -> str | None:
        return cause_of(log, quantization=self._quantization)

    def last_error(self, log: str) -> str:
        return last_error(log, self._log)


def drafting(draft: DraftModel | None, options: ServerOptions) -> list[str]:
    """vLLM's flags for proposing tokens by this model."""
    if draft is None:
        return []
    return ["--speculative-config", draft.speculative_config(options.draft_tokens, options.ranks)]


def flags(folder: Path, port: int, socket: Path, ranks: int, cpu: bool, draft: DraftModel | None = None) -> list[str]:
    """vLLM's flags for an engine that takes its weights from a replica. `draft`: see `Server`."""
    extra = {"socket": str(socket)} | ({} if draft is None else {"draft": str(draft.folder)})
    out = ["--model", str(folder), "--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
    out += ["--load-format", "swarm", "--model-loader-extra-config", json.dumps(extra)]
    out += ["--weight-transfer-config", '{"backend": "swarm"}']
    out += ["--middleware", "swarm_vllm.front.SwarmFront", "--logprobs-mode", "processed_logprobs"]
    out += ["--tensor-parallel-size", str(ranks)] if ranks > 1 else []
    if cpu:
        # For DeepSeek's attention. vLLM's other CPU backend frees the weights that it packs, and cannot reload them.
        attention = ["--attention-backend", "CPU_MLA"] if _has_setting(folder, "kv_lora_rank") else []
        return [*out, "--enforce-eager", *attention]
    # Only vLLM's triton kernel for experts leaves their weights as the checkpoint has them. The setting for the number
    # of experts has several names: num_experts, num_local_experts, n_routed_experts, moe_num_experts.
    return [*out, "--moe-backend", "triton"] if _has_setting(folder, "experts") else out


def _has_setting(folder: Path, word: str) -> bool:
    """Whether the name of any setting in the model's config contains `word`."""
    config = _config_of(folder)
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, dict) else {})
    return any(word in name for part in parts for name in part)


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}  # vLLM's own message names the problem
    return config if isinstance(config, dict) else {}


def environment(
    ours: Mapping[str, str], ranks: int, cpu: bool, threads: int | None = None, devices: DeviceShare = ANY_DEVICE
) -> dict[str, str]:
    """The environment variables of a vLLM that is to be started: it uses no network, and what the user set stays.

    `ours`: this process's environment. `threads`: CPU threads of all ranks together, where several engines share.
    `devices`: its GPUs; or the cores to which its ranks are bound, where no number of threads was given.
    """
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if cpu:
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}  # otherwise the first logprobs compile
        env["VLLM_CPU_INT4_W4A8"] = "0"  # packed int4 codes compute with bf16 activations, as the trainer does
        cores = devices.cores or sorted(os.sched_getaffinity(0))
        if threads is not None:  # several engines share the cores, so none may bind its threads to one
            ours = {**ours, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, threads // ranks))}
        elif ranks > 1 or devices.cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_ranks(cores, ranks)
    elif devices.gpus:
        ours = {**ours, "CUDA_VISIBLE_DEVICES": ",".join(devices.gpus)}
    return env | {name: value for name, value in ours.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def attach_to(url: str, socket: Path) -> None:
    """Tell the vLLM at `url` to connect to `socket`. Raises `UsageError` when there is none, or it lacks the plugin."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise UsageError(f"{url} is no URL of a vLLM on this machine; write it like http://127.0.0.1:8000")
    give_up_at = time.monotonic() + HUNG_UP_WITHIN_S
    while True:
        status, answer = _ask_to_attach(url, parts.hostname, parts.port or 80, socket)
        if status != 409 or time.monotonic() > give_up_at:
            break
        time.sleep(LOOK_EVERY_S)
    if status == 404:
        raise UsageError(
            f"The vLLM at {url} runs without the plugin. Install it ({PLUGIN}) there and start vLLM with "
            """--middleware swarm_vllm.front.SwarmFront --weight-transfer-config '{"backend": "swarm"}' """
            "--logprobs-mode processed_logprobs"
        )
    if status != 200:
        try:
            why = json.loads(answer)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = f"it answers with {status}"
        raise UsageError(f"The vLLM at {url} does not attach: {why}")


def _ask_to_attach(url: str, host: str, port: int, socket: Path) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=ASK_WITHIN_S)
    try:
        connection.request("POST", "/swarm/attach", json.dumps({"socket": str(socket)}))
        response = connection.getresponse()
        return response.status, response.read(65536)
    except (OSError, http.client.HTTPException) as error:
        raise UsageError(f"Nothing answers at {url} ({error}). Is vLLM running there?") from error
    finally:
        connection.close()
