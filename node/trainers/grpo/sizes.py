"""The models that the reference trainer comes with, each with its task and the settings with which it learns well."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from codec.errors import UsageError
from node.trainers.grpo.small import ContinueText, small_folder
from node.trainers.grpo.smollm2 import Sums, smollm2_folder
from node.trainers.grpo.task import SortLetters, Task
from node.trainers.grpo.tiny import TinyRecipe, tiny_folder
from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer
from node.trainers.grpo.warmup import Progress

__all__ = ["SIZES", "Size", "make_trainer"]


class Size(NamedTuple):
    """`folder(progress)`: the base checkpoint, made or from the cache. `task(folder)`: what to train it on."""

    folder: Callable[[Progress], Path]
    task: Callable[[Path], Task]
    config: GrpoConfig


SIZES: Final[dict[str, Size]] = {
    "tiny": Size(tiny_folder, lambda folder: SortLetters(TinyRecipe().letters), GrpoConfig()),
    "small": Size(small_folder, ContinueText.of, GrpoConfig(lr=1e-6, prompts=12, rows=32)),
    "smollm2": Size(smollm2_folder, Sums.of, GrpoConfig(lr=1e-6, prompts=8, rows=16)),
}


def make_trainer(
    name: str, *, seed: int, lr: float | None, progress: Progress, device: str | None = None
) -> tuple[Path, GrpoTrainer]:
    """The base folder (version 0) and a trainer on it.

    `name`: a key of `SIZES`. `seed`: fixes prompts and samples. `lr`: None takes the size's own. `progress(line)`:
    called with what is being made. `device`: None takes a GPU if there is one. Raises `UsageError` for an unknown size,
    and for a base that cannot be made.
    """
    size = SIZES.get(name)
    if size is None:
        raise UsageError(f"There is no size {name!r}: take one of {', '.join(SIZES)}.")
    folder = size.folder(progress)
    config = size.config if lr is None else msgspec.structs.replace(size.config, lr=lr)
    return folder, GrpoTrainer(folder, size.task(folder), config, seed=seed, device=device)
