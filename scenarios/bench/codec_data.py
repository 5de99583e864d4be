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
from platformdirs import user_cache_path

from codec.bits import DTYPES, Bits, DType
from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS
from node.tools.made_up import amplitude_of, made_up_norm, made_up_step
from node.tools.shapes import Kind, Shapes, shape_names, shapes_of

__all__ = [
    "BACK",
    "REAL_RATES",
    "SHAPE_NAMES",
    "SMALL",
    "Part",
    "checkpoints",
    "fabricate",
    "fabricate_shapes",
    "real_steps",
    "shapes",
]

_PART_ELEMENTS: Final = 8 * BLOCK_ELEMENTS

SMALL: Final = "16m"
SHAPE_NAMES: Final = (SMALL, *shape_names())
_SMALL_SHAPES: Final = Shapes("one matrix of 16 million elements", (Kind("w", (4096, 4096)),))

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


def shapes(name: str) -> Shapes:
    """The tensors of a model by name. Raises `UsageError` for an unknown name."""
    return _SMALL_SHAPES if name == SMALL else shapes_of(name)


def fabricate(name: str, density: float, seed: int = 0, share: float = 1) -> Iterator[Part]:
    """Yield a made-up step of a model with these shapes. `share`: the share of the rows of each matrix.

    Raises `UsageError` for unknown shapes.
    """
    yield from fabricate_shapes(shapes(name), density, seed, share)


def fabricate_shapes(model: Shapes, density: float, seed: int = 0, share: float = 1) -> Iterator[Part]:
    """As `fabricate`."""
    amplitude = amplitude_of(density)
    rng = np.random.default_rng(seed)
    for kind in model.kinds:
        for full in kind.names():
            if len(kind.shape) == 1:
                ones = made_up_norm(kind.elements)
                yield Part(full, DTYPES["BF16"], ones, ones)
                continue
            rows, columns = kind.shape
            left = max(1, round(rows * share))
            step = _PART_ELEMENTS // columns
            while left > 0:
                here = min(left, step)
                yield Part(full, DTYPES["BF16"], *made_up_step(here, columns, amplitude, rng))
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
