"""What SkyRL does at each step, on the swarm: CONTROL GATEWAY BASE OUT LOST.

With SKYRL_SOURCE, SkyRL's own client, delta publisher and sender do it, from a clone (Ray and its logger are replaced:
nothing here calls them). Without, `Written` writes and asks the same. The process LOST, a node, is killed when the
first sample of the second step has come. Prints JSON.
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
from recipe_kit import root_of
from safetensors.torch import load_file

VERSIONS, SAMPLES = 3, 16
SAMPLING = {"max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 1}
PROMPT = [1, 2, 3, 0, 26]


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

    async def generate(self) -> list[int]:
        asked = {"sampling_params": SAMPLING, "model": "policy", "token_ids": PROMPT}
        return (await self._post(f"{self._gateway}/inference/v1/generate", asked))["choices"][0]["token_ids"]

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
            proxy_url=self._gateway, server_urls=[self._control], data_parallel_size=1, model_name="policy",
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

    async def generate(self) -> list[int]:
        found = await self._own.generate({"prompt_token_ids": [PROMPT], "sampling_params": SAMPLING})
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
    control, gateway, base, out, lost = sys.argv[1:]
    trainer = (Own if os.environ.get("SKYRL_SOURCE") else Written)(control, gateway, Path(base), Path(out))
    await trainer.begin()
    tensors, wanted, drawn = load_file(Path(base) / "model.safetensors"), [], 0
    for version in range(1, VERSIONS + 1):
        samples = [asyncio.create_task(trainer.generate()) for _ in range(SAMPLES)]
        for sample in asyncio.as_completed(samples):
            assert 1 <= len(await sample) <= SAMPLING["max_tokens"]
            drawn += 1
            if version == 2 and drawn == SAMPLES + 1:
                os.kill(int(lost), signal.SIGKILL)
        for name, tensor in list(tensors.items())[version:]:  # some stay as they are
            tensors[name] = tensor = tensor.clone()
            tensor.view(torch.int16).view(-1)[version::7] ^= 1
        await trainer.send(tensors)
        wanted.append(root_of(Path(base), tensors, Path(out) / f"version_{version}"))
    await trainer.close()
    print(json.dumps({"wanted": wanted, "drawn": drawn}))


if __name__ == "__main__":
    asyncio.run(main())
