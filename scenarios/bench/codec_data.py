"""The input data of the codec benchmark: real RL steps, a user's checkpoints, or made-up steps of true shapes.

All sources stream: each yields parts of tensors, in whole blocks.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from platformdirs import user_cache_path

from codec.bits import DTYPES, Bits, DType
from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS

__all__ = ["BACK", "REAL_RATES", "SHAPES", "Part", "checkpoints", "fabricate", "real_steps"]

_PART_ELEMENTS: Final = 8 * BLOCK_ELEMENTS

SHAPES: Final[dict[str, tuple[tuple[str, tuple[int, int], int], ...]]] = {
    "qwen3-8b": (
        ("model.embed_tokens.weight", (151936, 4096), 1),
        ("lm_head.weight", (151936, 4096), 1),
        ("q_proj", (4096, 4096), 36),
        ("k_proj", (1024, 4096), 36),
        ("v_proj", (1024, 4096), 36),
        ("o_proj", (4096, 4096), 36),
        ("gate_proj", (12288, 4096), 36),
        ("up_proj", (12288, 4096), 36),
        ("down_proj", (4096, 12288), 36),
        ("input_layernorm", (1, 4096), 36),
        ("post_attention_layernorm", (1, 4096), 36),
        ("q_norm", (1, 128), 36),
        ("k_norm", (1, 128), 36),
        ("model.norm", (1, 4096), 1),
    ),
    "16m": (("w", (4096, 4096), 1),),
}
"""Matrices as (name, (rows, columns), count). qwen3-8b has 8,190,735,360 elements."""

REAL_RATES: Final = (3e-7, 1e-6, 3e-6)
"""Learning rates of the reference trainer's `small`: about 0.35, 1 and 2.5 % of its elements change per step."""
_REAL_STEPS: Final = 24
BACK: Final = (0, 1, 2, 4, 8, 16)
"""Versions of a run that are kept, as the number of steps before the last."""


@dataclass(frozen=True, slots=True)
class Part:
    """Whole blocks of one tensor before and after a step (the last block of a tensor may be shorter)."""

    name: str
    dtype: DType
    old: Bits
    new: Bits


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, as torch does."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _step(rows: int, columns: int, amplitude: float, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """Return the bf16 bits of a matrix before and after one update of its fp32 masters.

    Masters are normal with standard deviation 0.02 and rows scaled by exp(0.25 n), n normal. Updates are normal (the
    stationary state of AR(1) momentum) with rows and columns scaled by exp(0.3 n) and mean size `amplitude`. Only the
    amplitude is fitted, to a density. The entropies of positions and differences by exponent and the share of one-unit
    steps were not fitted; they are within 3 % of those of real steps.
    """
    scale = np.exp(0.25 * rng.standard_normal((rows, 1), np.float32))
    master = rng.standard_normal((rows, columns), np.float32) * (np.float32(0.02) * scale)
    factor = np.exp(0.3 * rng.standard_normal((rows, 1), np.float32)) * np.exp(
        0.3 * rng.standard_normal((1, columns), np.float32)
    )
    factor *= np.float32(amplitude / 0.798) / factor.mean()
    before = _bf16(master.reshape(-1))
    factor *= rng.standard_normal((rows, columns), np.float32)
    return before, _bf16((master - factor).reshape(-1))


def _amplitude(density: float) -> float:
    """Return the mean size of an update at which this share of elements changes."""
    low, high = 1e-10, 1e-2
    for _ in range(20):
        middle = (low * high) ** 0.5
        old, new = _step(128, 4096, middle, np.random.default_rng(1))
        low, high = (middle, high) if np.mean(old != new) < density else (low, middle)
    return high


def fabricate(shapes: str, density: float, seed: int = 0, share: float = 1) -> Iterator[Part]:
    """Yield a made-up step of a model with these shapes. `share`: the share of the rows of each matrix.

    Raises `UsageError` for unknown shapes.
    """
    if shapes not in SHAPES:
        raise UsageError(f"There are no shapes {shapes!r}: use one of {', '.join(SHAPES)}.")
    amplitude = _amplitude(density)
    rng = np.random.default_rng(seed)
    for name, (rows, columns), count in SHAPES[shapes]:
        for layer in range(count):
            full = name if count == 1 else f"model.layers.{layer}.{name}.weight"
            if rows == 1:  # norms are about 1.0, where a unit in the last place is 1/128: no such update moves them
                ones = np.full(columns, 0x3F80, np.uint16)
                yield Part(full, DTYPES["BF16"], ones, ones)
                continue
            left = max(1, round(rows * share))
            step = _PART_ELEMENTS // columns
            while left > 0:
                here = min(left, step)
                yield Part(full, DTYPES["BF16"], *_step(here, columns, amplitude, rng))
                left -= here


def checkpoints(old: Path, new: Path) -> Iterator[Part]:
    """Yield the parts of two memory-mapped checkpoints. Raises `UsageError` when their tensors differ."""
    before, after = Checkpoint.open(old), Checkpoint.open(new)
    if not before.layout.same_tensors(after.layout):
        raise UsageError(f"{old} and {new} are not two versions of one model.")
    for tensor in before.layout.tensors:
        a, b = before.bits(tensor.name), after.bits(tensor.name)
        for start in range(0, tensor.elements, _PART_ELEMENTS):
            end = start + _PART_ELEMENTS
            yield Part(tensor.name, tensor.type, a[start:end], b[start:end])


def _trainer_digest() -> str:
    """Return a digest of the trainer's sources, so that cached steps of an older trainer are not used."""
    package = find_spec("node.trainers.grpo")  # found, not imported: that would load torch
    assert package is not None
    assert package.origin is not None
    hasher = blake3()
    for name in ("small.py", "trainer.py", "loss.py", "loop.py", "sizes.py", "warmup.py"):
        hasher.update(Path(package.origin).with_name(name).read_bytes())
    return hasher.hexdigest(4)


def real_steps(rate: float) -> dict[int, Path]:
    """Return checkpoint folders of a run of the reference trainer's `small`, by steps before its last (`BACK`).

    They are computed once per state of the trainer, then cached. That takes half an hour on two cores: a warm-up that
    all rates share, then the steps. Raises `UsageError` when the trainer fails.
    """
    folder = user_cache_path("swarm-node") / "steps" / f"small-lr{rate:g}-{_REAL_STEPS}-{_trainer_digest()}"
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        command = [sys.executable, "-m", "node.trainers.grpo", "--size", "small", "--steps", str(_REAL_STEPS)]
        command += ["--lr", f"{rate:g}", "--snapshots", str(partial), "--snapshots-from", str(_REAL_STEPS - max(BACK))]
        print(f"making {_REAL_STEPS} steps of small at lr {rate:g}, once", file=sys.stderr)
        run = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if run.returncode:
            raise UsageError("The reference trainer failed; install the extra 'torch', or use --data made-up.")
        for version in partial.iterdir():
            if _REAL_STEPS - int(version.name[1:]) not in BACK:
                shutil.rmtree(version)
        partial.rename(folder)
    return {back: folder / f"v{_REAL_STEPS - back:04d}" for back in BACK}
