"""One process that creates a vLLM engine for each cell, one after the other. Runs in vLLM's Python.

A separate process for each engine would take 20 s, mostly for imports. The API server and the process of the engine
core are left out; the plugin's front, core and rank, and all that they do to the weights, are the product's. The
process reads one JSON object per line on stdin, and writes one on stdout after "HOST ":

    {"do": "live", "folder": ..., "socket": ..., "more": {}}  -> {"ready": ...}; the front then serves the driver until
                                                                  it hangs up -> {"digests": [...]}, one per generation
    {"do": "fresh", "folder": ..., "prompts": [...], "tokens": 8, "more": {}} -> {"answers": [...], "digests": {}}
    {"do": "loads", "folder": ..., "more": {}}                 -> {"ready": ...}: vLLM itself loads the folder

The answer is `{"error": ...}` when vLLM cannot load the folder.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import gc
import hashlib
import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

KV_CACHE_BYTES = 64 << 20
OF_STEPS = ("kv_cache", "topk_ids")
"""Names of tensors that each step writes before it reads them: caches, and the experts that a router chose."""
FLAGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4,
    "kv_cache_memory_bytes": KV_CACHE_BYTES, "logprobs_mode": "processed_logprobs",
    "weight_transfer_config": {"backend": "swarm"}, "attention_backend": "CPU_MLA",  # as node.engines.vllm.server does
}  # fmt: skip


def _engine(folder: str, more: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(model=folder, **(FLAGS | more))


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _model(llm: Any) -> Any:
    worker = _core(llm).model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner.model


def _digests(llm: Any) -> dict[str, str]:
    """Return a digest of every tensor that the model computes with, by its path: those of its modules, and those that
    the helper objects of modules keep, such as an attention's. What steps write (`OF_STEPS`) is left out."""
    found: dict[str, str] = {}
    for prefix, module in _model(llm).named_modules():
        found |= _held({**vars(module), **module._parameters, **module._buffers}, prefix, 2)
    return found


def _held(owned: dict[str, Any], path: str, deep: int) -> dict[str, str]:
    """The digests of the tensors in `owned`, and of those of its helper objects, which are at most `deep` deep."""
    import torch

    found: dict[str, str] = {}
    for name, value in owned.items():
        if name.startswith(OF_STEPS):
            continue
        if isinstance(value, torch.Tensor):
            if value.numel() and value.device.type != "meta":
                data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                found[f"{path}.{name}"] = hashlib.blake2b(data.tobytes(), digest_size=12).hexdigest()
        elif deep and hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)):
            # the plugin makes an attribute of some attentions a property (`swarm_vllm.sinks`)
            computed = {"sinks": value.sinks} if isinstance(getattr(type(value), "sinks", None), property) else {}
            found |= _held(vars(value) | computed, f"{path}.{name}", deep - 1)
    return found


class _Client:
    """Replaces vLLM's engine client, which the plugin's front uses, with the engine of this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.vllm_config, self.engine_core = llm.llm_engine.vllm_config, self
        self.digests: list[dict[str, str]] = []

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        return getattr(_core(self._llm), name)(*args)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": request.init_info})

    async def generate(self, prompt: Any, sampling: Any, _: str, lora_request: Any = None) -> Any:
        output = self._llm.generate(prompt, sampling, use_tqdm=False, lora_request=lora_request)[0]
        self.digests.append(_digests(self._llm))  # a model's first step may convert tables, such as of rotary angles
        yield output


def _live(asked: dict[str, Any]) -> dict[str, Any]:
    from swarm_vllm.channel import Closed, connect
    from swarm_vllm.front import SwarmFront, _facts
    from swarm_vllm.messages import FromDriver

    extra = {"load_format": "swarm", "model_loader_extra_config": {"socket": asked["socket"]}}
    llm = _engine(asked["folder"], asked["more"] | extra)
    core, client, front = _core(llm), _Client(llm), SwarmFront(None)
    if not hasattr(core, "_send_abort_outputs"):  # a method of the core's process, which is left out
        core._send_abort_outputs = lambda outputs: None
    _say({"ready": _architecture(llm), "dtype": str(llm.llm_engine.model_config.dtype)})
    loop = asyncio.new_event_loop()
    channel = connect(asked["socket"], FromDriver)
    try:
        channel.send(_facts(client.vllm_config, None, None))
        while True:
            message, fds = channel.recv()
            for fd in fds:
                os.close(fd)
            loop.run_until_complete(front._answer_driver(channel, client, message))
    except Closed:
        return {"digests": client.digests}
    finally:
        channel.close()
        loop.close()


def _fresh(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = _engine(asked["folder"], asked["more"])
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], logprobs=0, ignore_eos=True, detokenize=False)
    answers = []
    for prompt in asked["prompts"]:
        output = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0]
        logprobs = [at[token].logprob for at, token in zip(output.logprobs, output.token_ids)]  # noqa: B905
        answers.append([list(output.token_ids), logprobs])
    return {"answers": answers, "digests": _digests(llm), "dtype": str(llm.llm_engine.model_config.dtype)}


def _loads(asked: dict[str, Any]) -> dict[str, Any]:
    return {"ready": _architecture(_engine(asked["folder"], asked["more"]))}


def _architecture(llm: Any) -> str:
    return type(_model(llm)).__name__


def _say(answer: dict[str, Any]) -> None:
    print("HOST " + json.dumps(answer), flush=True)


_collect = gc.collect


def _collect_seldom() -> None:
    """Make `_free` the only place that collects garbage, and exempt the objects of the imports.

    vLLM collects garbage nine times per engine, each time over the objects of its imports, which takes most of an
    engine's start.
    """
    _collect()
    gc.freeze()
    gc.collect = lambda *_: 0
    gc.freeze = gc.unfreeze = lambda: None


def _free() -> None:
    """Free the last engine, so that the next one starts like the first."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    _collect()
    cleanup_dist_env_and_memory()


def main() -> None:
    import vllm
    from vllm import LLM  # noqa: F401 - imports the rest
    from vllm.v1.engine import core  # noqa: F401

    if "--experts-in-place" in sys.argv:
        import swarm_experts  # noqa: F401
    _collect_seldom()
    work = {"live": _live, "fresh": _fresh, "loads": _loads}
    _say({"vllm": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        try:
            answer = work[asked["do"]](asked)
        except Exception as error:  # any error of vLLM is an answer
            answer = {"error": _sentence(error)}
        _free()
        _say(answer | {"seconds": round(time.perf_counter() - started, 2)})


def _sentence(error: BaseException) -> str:
    """Return the root cause of an error as text; vLLM wraps it."""
    while (cause := error.__cause__) is not None:
        error = cause
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


if __name__ == "__main__":
    main()
