"""An engine of numpy arrays for tests of the engine process. Its completions contain a hash of its live bits.

An adapter's bits are kept as they are given, and count as live bits of its completions. Files beside the config make it
misbehave: `poison` fails the next commit halfway, `torn` the rewind of the next judgement, `die` ends the process in
`generate` or in a rewind, `hang` never answers, `slow` takes 0.3 s for each batch, `liar` tells another root of an
adapter than it has, `flip` changes a bit of the next adapter that is proven. It refuses adapters of rank 7.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec.errors import UsageError
from codec.layout import Layout
from node.engines.adapters import GivenAdapter, map_weights, slot_root
from node.engines.base import BASE_VERSION, Completion, EngineError, Prompt, SamplingParams, Span, Version
from node.engines.interface import InProcessEngine, TensorChanges
from node.engines.judgement import Claim, Judgement
from node.engines.window import places


class NumpyEngine(InProcessEngine):
    def __init__(self, *, threads: int | None = None, device: str | None = None) -> None:
        self.bits: dict[str, NDArray[Any]] = {}
        self.staged: list[TensorChanges] = []
        self.version, self.root, self.poisoned = BASE_VERSION, b"", None
        self.reloads = 0
        self.adapters: dict[int, tuple[GivenAdapter, NDArray[np.uint16]]] = {}
        self.prepared: tuple[GivenAdapter, NDArray[np.uint16]] | None = None

    def load(self, folder: Path, *, weights: bool = True) -> None:
        assert not weights
        if not (folder / "config.json").exists():
            raise UsageError(f"{folder} has no config.json: give a Hugging Face model folder.")
        self.folder = folder

    def attach(self, layout: Layout, version: Version = BASE_VERSION, root: bytes = b"") -> None:
        self.layout, self.version, self.root = layout, version, root
        self.bits = {t.name: np.zeros(t.elements, t.type.bits) for t in layout.tensors}

    def stage(self, changes: Iterable[TensorChanges]) -> None:
        self._refuse_if_poisoned()
        self.staged = []
        self.staged = [(name, indices.copy(), bits.copy()) for name, indices, bits in changes]

    def commit(self, version: Version, root: bytes) -> float:
        self._refuse_if_poisoned()
        self.poisoned = "in the middle of a commit"
        for name, indices, bits in self.staged:
            self.bits[name][indices] = bits
            if (self.folder / "poison").exists():
                (self.folder / "poison").unlink()
                raise RuntimeError("the accelerator fell off the bus")
        self.version, self.root, self.poisoned = version, root, None
        return 0.001

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> list[Completion]:
        self._refuse_if_poisoned()
        version = self.version_of(adapter)
        own = next((bits for given, bits in self.adapters.values() if given.name == adapter), None)
        for name in ("die", "hang"):
            if (self.folder / name).exists():
                (self.folder / name).unlink()
                os._exit(9) if name == "die" else time.sleep(1000)
        if (self.folder / "slow").exists():
            time.sleep(0.3)
        live = self.hash_live()
        live.update(b"" if own is None else own.tobytes())
        marker = int.from_bytes(live.digest(2), "little")
        spans = (Span(version, 0, 3),)
        return [Completion((marker, p.stream % 1000 + 3, 2), (-0.5, -1.0, -2.0), "stop", spans) for p in prompts]

    def stage_adapter(self, adapter: GivenAdapter) -> bytes:
        self._refuse_if_poisoned()
        if adapter.config.rank == 7:
            raise UsageError("This engine takes no adapters of rank 7: train it with --rank 8.")
        adapter.config.tensors(self.layout)
        bits = map_weights(adapter.fd).copy()
        root = slot_root(adapter.slot, adapter.config.to_bytes(), bits)
        if root != adapter.root:
            raise EngineError("the bits of the adapter are not those of its version")
        self.prepared = (adapter, bits)
        return bytes(32) if (self.folder / "liar").exists() else root

    def switch_adapter(self, slot: int) -> float:
        if self.prepared is None or self.prepared[0].slot != slot:
            raise EngineError(f"no adapter is staged for slot {slot}")
        self.adapters[slot], self.prepared = self.prepared, None
        return 0.002

    def drop_adapter(self, slot: int) -> None:
        self.adapters.pop(slot, None)

    def adapter_root(self, slot: int) -> bytes:
        if slot not in self.adapters:
            raise EngineError(f"slot {slot} has no adapter")
        given, bits = self.adapters[slot]
        if (self.folder / "flip").exists():
            (self.folder / "flip").unlink()
            bits[0] ^= 1
        return slot_root(slot, given.config.to_bytes(), bits)

    def version_of(self, adapter: str) -> Version:
        for given, _ in self.adapters.values():
            if given.name == adapter:
                return max(self.version, given.version)
        return super().version_of(adapter)

    def judge(self, claims: Sequence[Claim]) -> list[Judgement | Exception]:
        self._refuse_if_poisoned()
        first = self.bits[min(self.bits)]
        if (self.folder / "torn").exists():
            (self.folder / "torn").unlink()
            self.poisoned = "in the middle of a rewind"
            first[0] ^= 1
            raise RuntimeError("the accelerator fell off the bus")
        if (self.folder / "die").exists():
            (self.folder / "die").unlink()
            first[0] ^= 1
            os._exit(9)
        margins = [(0.5,) * claim.tokens if claim.sampling.extra.portable else () for claim in claims]
        previous = [(-2.0,) * claim.tokens if claim.previous else () for claim in claims]
        scores = [tuple(-1.0 - token for token in claim.token_ids[claim.start :]) for claim in claims]
        return [Judgement(self.version, *found) for found in zip(scores, previous, margins, strict=True)]

    def hash_live(self) -> blake3:
        hasher = blake3()
        for name in sorted(self.bits):
            hasher.update(self.bits[name].view(np.uint8))
        return hasher

    def live_hashes(self, layout: Layout) -> NDArray[np.uint8]:
        hashes = np.empty((layout.n_blocks, 32), np.uint8)
        for block in range(layout.n_blocks):
            spec = layout.block(block)
            part = self.bits[spec.name][spec.start : spec.start + spec.count]
            hashes[block] = np.frombuffer(blake3(part.view(np.uint8)).digest(), np.uint8)
        return hashes

    unreadable = ""

    def read_blocks(self, blocks: Sequence[int], window: NDArray[np.uint8]) -> None:
        for place in places(self.layout, blocks):
            place.view(window)[:] = self.bits[place.spec.name][place.spec.start :][: place.spec.count]

    def reload(self, bits: Callable[[str], NDArray[Any]], version: Version, root: bytes) -> None:
        for name in self.bits:
            self.bits[name][:] = bits(name)
        self.version, self.root, self.poisoned = version, root, None
        self.reloads += 1  # stands for something that is measured once the weights are there
        self.abilities = frozenset({f"class:numpy/{self.reloads}/cpu/float32/none/tp1"})

    def _refuse_if_poisoned(self) -> None:
        if self.poisoned:
            raise EngineError(self.poisoned)
