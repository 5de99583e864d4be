"""The GPUs that engines of this machine may use, as their own torch sees them.

torch is asked in a child process of the engine's environment: CUDA then applies `CUDA_VISIBLE_DEVICES` itself, with
indices, UUIDs and parts of GPUs (MIG), and a broken driver ends the child only.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from node.engines.device_plan import Gpu

__all__ = ["TorchGpus", "ask_gpus", "named_gpus", "visible_gpus"]

ASK_WITHIN_S: Final = 60.0
"""For a child process to import torch and ask the driver: some seconds on a warm disk."""
_ASK_TORCH: Final = """
import json, torch
there = torch.cuda.is_available()
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if there else []
print(json.dumps([torch.version.cuda or torch.version.hip or "", there, [(g.name, g.total_memory) for g in gpus]]))
"""


class TorchGpus(NamedTuple):
    """What torch says. `cuda`: the CUDA release that it was built for; empty: none. `models`: the GPUs' models, as
    "NVIDIA H100", and `gpus` the GPUs, in the same order. `error`: why torch could not be asked."""

    cuda: str = ""
    usable: bool = False
    models: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@cache
def visible_gpus(python: Path) -> TorchGpus:
    """As `ask_gpus`; a process asks once."""
    return ask_gpus(python)


def ask_gpus(python: Path) -> TorchGpus:
    """The GPUs that the torch of this Python sees. Blocks, for `ASK_WITHIN_S` at most."""
    try:
        asked = subprocess.run(
            [python, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=ASK_WITHIN_S, check=True
        )
        cuda, usable, found = json.loads(asked.stdout.strip().splitlines()[-1])
        models = tuple(str(model) for model, _ in found)
        return TorchGpus(str(cuda), bool(usable), models, named_gpus([int(size) for _, size in found], os.environ))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError) as error:
        said = getattr(error, "stderr", None) or str(error)
        last = str(said).strip().splitlines()[-1:] or ["it did not start"]
        return TorchGpus("?", error=last[0])


def named_gpus(sizes: list[int], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The visible GPUs with the names by which another process can be given some of them.

    `sizes`: bytes of each. CUDA takes the entries of `CUDA_VISIBLE_DEVICES` in order, up to the first that is none.
    """
    given = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = given if given[0] else [str(index) for index in range(len(sizes))]
    return tuple(Gpu(name, size) for name, size in zip(names, sizes, strict=False))
