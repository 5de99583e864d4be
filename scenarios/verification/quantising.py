"""The transformers engine of a node that cheats: while its attack is a format, its weights are rounded to that format.

It keeps the true weights aside, so that commits and proofs see the bits that they expect.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codec.layout import Layout
from node.engines.base import Version
from node.engines.transformers import TransformersEngine
from scenarios.verification.cheating import FORMATS, read_attack
from scenarios.verification.models import quantised

__all__ = ["QuantisingEngine"]


class QuantisingEngine(TransformersEngine):
    """See the module. The attack is that of the node in whose home (`SWARM_HOME`) the engine runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._true: dict[str, torch.Tensor] = {}
        """The weights that are rounded now, as they should be."""

    def commit(self, version: Version, root: bytes) -> float:
        with self._as_it_should_be():
            return super().commit(version, root)

    def reload(self, bits: Callable[[str], NDArray[Any]], version: Version, root: bytes) -> None:
        with self._as_it_should_be():
            super().reload(bits, version, root)

    def live_hashes(self, layout: Layout) -> NDArray[np.uint8]:
        with self._as_it_should_be():
            return super().live_hashes(layout)

    @contextmanager
    def _as_it_should_be(self) -> Iterator[None]:
        """The true weights within the block; afterwards those of the present attack."""
        matrices = {
            name: parameter.data
            for name, parameter in self._loaded().named_parameters()
            if parameter.ndim == 2 and ".layers." in name
        }
        for name, true in self._true.items():
            matrices[name].copy_(true)
        self._true = {}
        yield
        form = read_attack(Path(os.environ["SWARM_HOME"]))
        if form in FORMATS:
            self._true = {name: matrix.clone() for name, matrix in matrices.items()}
            for matrix in matrices.values():
                matrix.copy_(quantised(matrix.float(), form))
