"""Writes versions as slime's disk transport does, and calls the hook: HOME BASE OUT.

With SLIME_SOURCE, slime's own `UpdateWeightFromDiskDelta`, from a clone, writes them (what it imports of Megatron, Ray
and its NCCL transport is replaced: nothing here calls that). Without, `write` does the same. Prints JSON.
"""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import torch.distributed as dist
import zstandard
from recipe_kit import root_of
from safetensors.torch import load_file

from codec.errors import UsageError
from node.status.query import ask
from node.trainers.disk_delta import checksum

KINDS = (("xor", "xxh3-128"), ("overwrite", "blake3"), ("xor", "adler32"))
VERSIONS = 2
"""Of each kind."""


def write(folder: Path, number: int, old: Any, new: Any, encoding: str, algorithm: str) -> Path:
    """A version folder with the tensors that changed, in two files."""
    deltas, sums = {}, {}
    for name in new:
        before, after = (tensors[name].view(torch.uint8).numpy().reshape(-1) for tensors in (old, new))
        places = np.flatnonzero(before != after).astype("<u4")
        if places.size:
            count = np.array([places.size], "<u4")
            parts = [count.view(np.uint8), places.view(np.uint8), after[places]]
            delta = before ^ after if encoding == "xor" else np.concatenate(parts)
            deltas[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(delta), np.uint8)
            sums[name] = checksum(algorithm, after)
    here = folder / f"weight_v{number:06d}"
    here.mkdir()
    files = {}
    for at in range(2):
        names = list(deltas)[at::2]
        files |= dict.fromkeys(names, file := f"model-{at:05d}-of-00002.safetensors")
        held = {name: deltas[name] for name in names}
        safetensors.numpy.save_file(held, here / file, {name: sums[name] for name in names})
    meta = {
        "version": f"{number:06d}", "base_version": f"{number - 1:06d}", "delta_encoding": encoding,
        "compression_format": "zstd", "checksum_format": algorithm,
    }  # fmt: skip
    (here / "model.safetensors.index.json").write_text(json.dumps({"metadata": meta, "weight_map": files}))
    return here


def slimes_own(source: str, args: Any) -> Any:
    """An `UpdateWeightFromDiskDelta` of slime, whose tensors are `args.tensors`, on one rank."""
    sys.path.insert(0, source)
    package = "slime.backends.megatron_utils.update_weight"

    class Parent:
        def __init__(self, args: Any, model: Any, weights_getter: Any, **_: Any) -> None:
            self.args, self.weight_version, self.update_weight_metrics = args, 0, {}

    for name in ("slime.backends.megatron_utils", package):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [f"{source}/{name.replace('.', '/')}"]  # without running its __init__
    mpu = SimpleNamespace(
        get_data_parallel_rank=lambda **_: 0, get_tensor_model_parallel_rank=lambda: 0,
    )  # fmt: skip
    fakes: dict[str, dict[str, Any]] = {
        "megatron": {}, "megatron.core": {"mpu": mpu}, "ray": {"get": lambda futures: futures},
        "ray.actor": {"ActorHandle": object}, f"{package}.update_weight_from_distributed":
        {"UpdateWeightFromDistributed": Parent},
    }  # fmt: skip
    for name, attributes in fakes.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
    importlib.import_module("slime.utils.accelerator").current_device = lambda: "cpu"  # of a sum that it logs
    module = importlib.import_module(f"{package}.update_weight_from_disk_delta")

    class OneRank(module.UpdateWeightFromDiskDelta):
        def _iter_hf_tensors(self) -> Any:
            yield from self.args.tensors.items()

    writer = OneRank(args, [], dict, model_name="qwen3", quantization_config=None)
    writer.connect_rollout_engines([], None)
    return writer


def main() -> None:
    home, base, out = sys.argv[1:]
    os.environ["SWARM_HOME"] = home
    from node.trainers import slime

    source, folder = os.environ.get("SLIME_SOURCE"), Path(out) / "updates"
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=0, world_size=1)
    rows = []
    for encoding, algorithm in KINDS:
        tensors = load_file(Path(base) / "model.safetensors")
        args = SimpleNamespace(
            hf_checkpoint=base, update_weight_disk_dir=str(folder), update_weight_delta_encoding=encoding,
            update_weight_delta_checksum=algorithm, update_weight_local_checkpoint_dir=out, tensors=tensors,
            custom_update_weight_post_write_path="node.trainers.slime.publish",
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        writer = slimes_own(source, args) if source else None
        if writer is None:
            slime.publish(args, str(folder), [])
        else:
            writer.update_weights()  # only captures the base
        for number in range(1, VERSIONS + 1):
            old = {name: tensor.clone() for name, tensor in tensors.items()}
            for name, tensor in list(tensors.items())[number:]:  # some stay as they are
                tensors[name] = tensor = tensor.clone()
                tensor.view(torch.int16).view(-1)[number::7] ^= 1
            if writer is None:
                slime.publish(args, str(write(folder, number, old, tensors, encoding, algorithm)), [])
            else:
                writer.update_weights()
            want = root_of(Path(base), tensors, Path(out) / f"version_{number}")
            rows.append((ask(Path(home)).root, want))
    try:
        slime.publish(args, str(write(folder, VERSIONS + 5, old, tensors, encoding, algorithm)), [])
        refused = ""
    except UsageError as error:
        refused = str(error)
    print(json.dumps({"rows": rows, "refused": refused}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
