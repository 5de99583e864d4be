"""Three steps of training as SkyRL does them, on the swarm: HOME CONTROL GATEWAY BASE OUT LOST STAYS.

With SKYRL_SOURCE, SkyRL's own client asks for samples, and its own delta publisher and sender send the versions, from a
clone (Ray and its logger are replaced: nothing here calls them). Without, `Written` asks and writes the same.
`recipe_kit.Policy` stands in for SkyRL's workers, which need GPUs. The process LOST, a node, is killed when the first
sample of the second step has come; STAYS: the home of another. Prints JSON.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import safetensors.torch
import torch
import xxhash
import zstandard
from recipe_kit import MAX_TOKENS, SAMPLES, Policy, live_roots, prompt_ids, root_of, rows_of
from safetensors.torch import load_file

from node.status.query import ask

STEPS = 3
SAMPLING = {
    "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": MAX_TOKENS,
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None,
}  # fmt: skip
"""As SkyRL's `get_vllm_sampling_params` makes them."""


class Written:
    """Writes a version as SkyRL does, and asks as its client asks."""

    def __init__(self, control: str, gateway: str, base: Path, out: Path) -> None:
        self._client, self._control, self._gateway = httpx.AsyncClient(timeout=120), control, gateway
        self._base, self._out, self._old = base, out, load_file(base / "model.safetensors")
        self._version = 0

    async def begin(self) -> None:
        assert (await self._client.get(f"{self._control}/get_world_size")).json() == {"world_size": 1}
        init = {"init_info": {"base_model_path": str(self._base), "local_checkpoint_dir": str(self._out)}}
        await self._post(f"{self._control}/init_weight_transfer_engine", init)

    async def generate(self, prompt: list[int]) -> list[int]:
        asked = {"sampling_params": SAMPLING, "model": str(self._base), "token_ids": prompt, "cache_salt": self._salt}
        return (await self._post(f"{self._gateway}/inference/v1/generate", asked))["choices"][0]["token_ids"]

    @property
    def _salt(self) -> str:
        return f"{self._base}@{self._version}"

    async def send(self, tensors: dict[str, torch.Tensor]) -> None:
        self._version += 1
        folder = self._out / f"delta-{self._version:08d}"
        folder.mkdir()
        payload, records = {}, []
        for name, tensor in tensors.items():
            new, old = (t.contiguous().view(torch.uint8).flatten() for t in (tensor, self._old[name]))
            if not torch.equal(new, old):
                data = zstandard.ZstdCompressor(level=3).compress((new ^ old).numpy().tobytes())
                payload[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                digest = xxhash.xxh3_128(new.numpy()).hexdigest()
                records.append({"name": name, "payload_file": "delta.safetensors", "payload_key": name,
                                "checksum": digest, "checksum_algorithm": "xxh3-128", "shape": []})  # fmt: skip
        safetensors.torch.save_file(payload, folder / "delta.safetensors")
        manifest = {"version": self._version, "base_version": self._version - 1, "tensors": records}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        self._old = {name: tensor.clone() for name, tensor in tensors.items()}
        await self._post(
            f"{self._control}/fetch_weights", {"target_version": self._version, "sync_dir": str(self._out)}
        )
        for path in ("pause?mode=keep", "collective_rpc", "update_weights", "resume"):
            await self._post(f"{self._control}/{path}", {})

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, url: str, value: Any) -> Any:
        return (await self._client.post(url, json=value)).raise_for_status().json()


class Own(Written):
    """SkyRL's own classes."""

    async def begin(self) -> None:
        source = os.environ["SKYRL_SOURCE"]
        for name in ("", ".backends", ".backends.skyrl_train", ".backends.skyrl_train.weight_sync", ".utils",
                     ".backends.skyrl_train.inference_servers", ".backends.skyrl_train.utils"):  # fmt: skip
            package = sys.modules[f"skyrl{name}"] = ModuleType(f"skyrl{name}")
            package.__path__ = [f"{source}/skyrl{name.replace('.', '/')}"]  # without running its __init__
        for name, attributes in {"ray": {}, "pybase64": {}, "skyrl.utils.log": {"logger": logging.getLogger()}}.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(attributes)
        from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
        from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk
        from skyrl.backends.skyrl_train.weight_sync.delta_strategy import DeltaTransferStrategy
        from transformers import AutoTokenizer

        self._chunk = WeightChunk
        self._own = RemoteInferenceClient(
            proxy_url=self._gateway, server_urls=[self._control], data_parallel_size=1, model_name=str(self._base),
            tokenizer=AutoTokenizer.from_pretrained(self._base),
        )  # fmt: skip
        delta = SimpleNamespace(
            sync_dir=str(self._out), local_checkpoint_dir=f"{self._out}/local", max_file_size_in_gb=1.0,
            publish_staging_dir=f"{self._out}/staging", cloud_download_workers=1, publish_num_workers=1,
            checkpoint_load_format="vllm_multi_thread_safetensors", multi_thread_safetensors_max_workers=1,
        )  # fmt: skip
        config: Any = SimpleNamespace(delta_weight_sync=delta, run_engines_locally=False)
        info = DeltaTransferStrategy.create_init_info(config, base_model_path=str(self._base))
        await self._own.init_weight_update_communicator(info)
        self._sender = DeltaTransferStrategy.create_sender(info, self._own)

    async def generate(self, prompt: list[int]) -> list[int]:
        asked = {"prompt_token_ids": [prompt], "sampling_params": SAMPLING, "cache_salt": self._salt}
        found = await self._own.generate(asked)
        assert len(found["response_logprobs"][0]) == len(found["response_ids"][0])
        return found["response_ids"][0]

    async def send(self, tensors: dict[str, torch.Tensor]) -> None:
        shapes, dtypes = [list(t.shape) for t in tensors.values()], [str(t.dtype) for t in tensors.values()]
        chunk = self._chunk(names=list(tensors), dtypes=dtypes, shapes=shapes, tensors=list(tensors.values()))
        await self._sender.send_chunks([chunk], reset_prefix_cache=True)

    async def close(self) -> None:
        await self._own.teardown()
        await super().close()


async def main() -> None:
    home, control, gateway, base, out, lost, stays = sys.argv[1:]
    torch.set_num_threads(1)
    policy = Policy(Path(base))
    trainer = (Own if os.environ.get("SKYRL_SOURCE") else Written)(control, gateway, Path(base), Path(out))
    await trainer.begin()
    prompts, versions, drawn = prompt_ids(), [], []
    for step in range(1, STEPS + 1):
        samples = [asyncio.create_task(trainer.generate(prompt)) for prompt in prompts for _ in range(SAMPLES)]
        await asyncio.wait(samples, return_when=asyncio.FIRST_COMPLETED)
        if step == 2:
            os.kill(int(lost), signal.SIGKILL)
        tokens = await asyncio.gather(*samples)
        drawn.append(sum(1 <= len(one) <= MAX_TOKENS for one in tokens))
        groups = [tokens[i : i + SAMPLES] for i in range(0, len(tokens), SAMPLES)]
        policy.step([row for prompt, group in zip(prompts, groups, strict=True) for row in rows_of(prompt, group)])
        await trainer.send(policy.tensors)
        root = ask(Path(home)).root
        want = root_of(Path(base), policy.tensors, Path(out) / f"step_{step}")
        versions.append({"root": root, "want": want, "live": live_roots(Path(stays), step, root)})
    await trainer.close()
    print(json.dumps({"versions": versions, "drawn": drawn}))


if __name__ == "__main__":
    asyncio.run(main())
