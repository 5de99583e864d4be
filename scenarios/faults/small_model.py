"""A model of a few megabytes that changes in every version, and its root, computed in this process."""

import shutil
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import FileSpec, Layout, Replica, TensorSpec, write_checkpoint
from codec.staging import block_hash

__all__ = ["CHARACTERS", "SmallModel"]

CHARACTERS: Final = [chr(code) for code in range(33, 127)]
"""The tokens, by id."""
KEPT: Final = 3
"""Folders of steps that stay: a trainer that is started again may read the one before."""


class SmallModel:
    """A checkpoint folder `base`, and one folder for each further step.

    `tensors`: bfloat16 tensors of `elements` elements, each of one block. `density`: share of a tensor's elements that
    a step changes. The same `seed` gives the same bits in every step.
    """

    def __init__(
        self, folder: Path, *, tensors: int = 40, elements: int = 30_000, density: float = 0.05, seed: int = 0
    ) -> None:
        self._folder, self._rng, self._density = folder, np.random.default_rng(seed), density
        self._files = {"config.json": b'{"model_type": "none"}', "tokenizer.json": _tokenizer()}
        specs = tuple(TensorSpec(f"layer.{i:03}.weight", "BF16", (elements,)) for i in range(tensors))
        files = tuple(FileSpec(name, len(data), blake3(data).digest()) for name, data in self._files.items())
        self._layout = Layout(specs, files)
        self._replica = Replica.create(self._layout)
        self._bits: dict[str, NDArray[np.uint16]] = {}
        self.step = 0
        """Of the newest folder; 0: the base."""
        for block, spec in enumerate(specs):
            values = (0.02 * self._rng.standard_normal(elements)).astype(np.float32)
            self._set(block, spec.name, (values.view(np.uint32) >> 16).astype(np.uint16))
        self.base = self._write(folder / "base")

    @property
    def root(self) -> str:
        """The root of the newest step's bits, in hex."""
        return self._replica.root.hex()

    @property
    def model_bytes(self) -> int:
        return self._layout.nbytes

    def next_step(self) -> Path:
        """Change some bits of every tensor; returns the folder of the new step, which replaces an old one."""
        self.step += 1
        for block, name in enumerate(list(self._bits)):
            bits = self._bits[name].copy()
            bits[self._rng.choice(len(bits), max(1, int(self._density * len(bits))), replace=False)] ^= 1
            self._set(block, name, bits)
        shutil.rmtree(self.folder_of(self.step - KEPT), ignore_errors=True)
        return self._write(self.folder_of(self.step))

    def folder_of(self, step: int) -> Path:
        """Of one of the last steps."""
        return self._folder / f"step_{step}"

    def _set(self, block: int, name: str, bits: NDArray[np.uint16]) -> None:
        self._bits[name] = bits
        self._replica.write_block(block, bits.tobytes(), block_hash(bits))

    def _write(self, folder: Path) -> Path:
        write_checkpoint(folder, self._layout, self._bits.__getitem__, self._files)
        return folder


def _tokenizer() -> bytes:
    """The file `tokenizer.json` of a tokenizer whose tokens are single characters."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {character: token for token, character in enumerate(CHARACTERS)}
    return Tokenizer(WordLevel(vocabulary, unk_token=CHARACTERS[0])).to_str().encode()
