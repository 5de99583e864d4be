"""An engine of numpy alone, run in the real engine process: weights are arrays, a completion says what they hold.

Files beside the config make it misbehave: `poison` fails the next commit halfway, `die` ends the process in generate,
`hang` never answers, `slow` takes a moment for each batch.
"""

import os
import time
from pathlib import Path

import numpy as np
from blake3 import blake3

from codec.errors import UsageError
from node.engines.base import BASE_VERSION, Completion, Engine, EngineError, Span


class NumpyEngine(Engine):
    def __init__(self, *, threads=None, device=None) -> None:
        self.bits: dict[str, np.ndarray] = {}
        self.version, self.root, self.poisoned = BASE_VERSION, b"", None

    def load(self, folder: Path, *, weights: bool = True) -> None:
        assert not weights
        if not (folder / "config.json").exists():
            raise UsageError(f"{folder} has no config.json: give a Hugging Face model folder.")
        self.folder = folder

    def attach(self, layout, version=BASE_VERSION, root=b"") -> None:
        self.layout, self.version, self.root = layout, version, root
        self.bits = {t.name: np.zeros(t.elements, t.type.bits) for t in layout.tensors}

    def stage(self, patch) -> None:
        self.staged = []
        for name, indices, bits in patch:
            self.staged.append((name, indices.copy(), bits.copy()))

    def commit(self, version, root) -> float:
        if self.poisoned:
            raise EngineError(self.poisoned)
        self.poisoned = "in the middle of a commit"
        for name, indices, bits in self.staged:
            self.bits[name][indices] = bits
            if (self.folder / "poison").exists():
                (self.folder / "poison").unlink()
                raise RuntimeError("the accelerator fell off the bus")
        self.version, self.root, self.poisoned = version, root, None
        return 0.001

    def generate(self, prompts, sampling):
        if self.poisoned:
            raise EngineError(self.poisoned)
        for name in ("die", "hang"):
            if (self.folder / name).exists():
                (self.folder / name).unlink()
                os._exit(9) if name == "die" else time.sleep(1000)
        if (self.folder / "slow").exists():
            time.sleep(0.3)
        marker = int.from_bytes(self.live().digest(2), "little")
        spans = (Span(self.version, 0, 3),)
        return [Completion((marker, p.stream % 1000 + 3, 2), (-0.5, -1.0, -2.0), "stop", spans) for p in prompts]

    def live(self):
        hasher = blake3()
        for name in sorted(self.bits):
            hasher.update(self.bits[name].view(np.uint8))
        return hasher

    def live_hashes(self, layout):
        hashes = np.empty((layout.n_blocks, 32), np.uint8)
        for block in range(layout.n_blocks):
            spec = layout.block(block)
            part = self.bits[spec.name][spec.start : spec.start + spec.count]
            hashes[block] = np.frombuffer(blake3(part.view(np.uint8)).digest(), np.uint8)
        return hashes

    def reload(self, bits, version, root) -> None:
        for name in self.bits:
            self.bits[name][:] = bits(name)
        self.version, self.root, self.poisoned = version, root, None
