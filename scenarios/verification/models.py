"""Models of two versions or more in an arithmetic class: as they are, or quantised as a node with less memory does it.

Versions come from kept steps (`Versions`) or from two checkpoints (`Checkpoints`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from node.engines.live import LiveParameters
from node.engines.load import load_model
from scenarios.verification.steps import apply_steps

__all__ = ["DTYPES", "FORMATS", "GROUP", "Checkpoints", "Versions", "quantised"]

DTYPES: Final = {"bf16": torch.bfloat16, "f32": torch.float32}
"""By name: in which transformers computes."""
FORMATS: Final = ("fp8", "int8", "int4")
GROUP: Final = 128
"""Weights that share a scale."""

Bits = dict[str, NDArray[np.uint16]]


class Versions:
    """The versions of one run."""

    def __init__(self, base: Path, run: Path) -> None:
        """`base`: the Hugging Face folder of version 0. `run`: the folder of the kept steps."""
        self.base, self.run = base, run
        self._checkpoint = Checkpoint.open(base)
        self.layout = self._checkpoint.layout
        self._held: tuple[int, Bits] = (0, _bits_of(self._checkpoint))

    @property
    def files(self) -> Mapping[str, bytes]:
        """The small files of the model's folder, by name."""
        return self._checkpoint.files

    def bits(self, version: int) -> Bits:
        """The bits of a version. The next call may change them."""
        held, bits = self._held
        if version < held:
            held, bits = 0, _bits_of(self._checkpoint)
        apply_steps(bits, self.run, range(held + 1, version + 1))
        self._held = version, bits
        return bits

    def model(self, version: int, arithmetic: str, form: str | None = None) -> Any:
        """A model with the bits of a version. `arithmetic`: a key of `DTYPES`. `form`: one of `FORMATS`, or None."""
        dtype = DTYPES[arithmetic]
        model = load_model(self.base, dtype, torch.device("cpu")).requires_grad_(False)
        live = LiveParameters(model, self.layout, dtype)
        shapes = {spec.name: spec.shape for spec in self.layout.tensors}
        for name, bits in self.bits(version).items():
            live.write(name, bits if form is None else _rounded(name, bits.reshape(shapes[name]), form))
        return model


class Checkpoints(Versions):
    """Two checkpoints of one model: the older one is version 0, the newer one version 1."""

    def __init__(self, older: Path, newer: Path) -> None:
        """Both are Hugging Face folders in bf16. Raises `UsageError` for others, and for those of two models."""
        super().__init__(older, older)
        self._newer = Checkpoint.open(newer)
        if not self.layout.same_tensors(self._newer.layout):
            raise UsageError(f"{older} and {newer} do not have the same tensors: give two checkpoints of one model.")
        if odd := next((spec for spec in self.layout.tensors if spec.dtype != "BF16"), None):
            raise UsageError(f"{older}: {odd.name} is {odd.dtype}. Give checkpoints in bf16.")

    def bits(self, version: int) -> Bits:
        """See `Versions.bits`."""
        return _bits_of(self._newer if version else self._checkpoint)

    @property
    def name(self) -> str:
        """Short, and other for other bits."""
        digest = blake3()
        for checkpoint in (self._checkpoint, self._newer):
            for spec in self.layout.tensors:
                digest.update(checkpoint.bits(spec.name).tobytes())
        return f"checkpoints-{digest.hexdigest(8)}"


def _bits_of(checkpoint: Checkpoint) -> Bits:
    return {spec.name: checkpoint.bits(spec.name).reshape(-1).copy() for spec in checkpoint.layout.tensors}


def _rounded(name: str, bits: NDArray[np.uint16], form: str) -> NDArray[np.uint16]:
    """The bf16 bits of a tensor that was quantised and dequantised; embeddings and norms stay as they are."""
    if bits.ndim != 2 or ".layers." not in name:
        return bits.reshape(-1)
    values = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()
    return quantised(values, form).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1)


def quantised(values: torch.Tensor, form: str) -> torch.Tensor:
    """`values` (rows, columns), rounded to a format with one scale for each `GROUP` of a row."""
    columns = values.shape[1]
    groups = torch.nn.functional.pad(values, (0, -columns % GROUP)).reshape(len(values), -1, GROUP)
    most = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[form]
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
    scaled = groups / scale
    rounded = scaled.to(torch.float8_e4m3fn).float() if form == "fp8" else scaled.round()
    return (rounded * scale).reshape(len(values), -1)[:, :columns]
