"""The reference engine: a Hugging Face `transformers` model, on a CPU or on a GPU where there is one.

Its parameters carry checkpoint names and lie in one piece, so taking a version is one `index_copy_` a tensor. It
batches prompts of equal length and knows no paging and no prefix cache: the fast engine is vLLM, this one shows what
is right.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from codec.layout import Layout
from node.engines.base import (
    BASE_VERSION,
    Completion,
    Engine,
    EngineError,
    Patch,
    Prompt,
    SamplingParams,
    Span,
    Version,
)
from node.engines.live import LiveParameters, Scatter
from node.engines.load import build_model, load_model
from node.engines.sampling import decode, uniforms

__all__ = ["Arithmetic", "TransformersEngine"]

Arithmetic = Literal["auto", "bfloat16", "float32"]
"""In what the model computes. Either way the live parameters hold exactly the checkpoint's bf16 bits."""

BATCH_ROWS: Final = 128
"""Rows sampled at once: past this a CPU gains nothing, and the KV cache stays small."""


class TransformersEngine(Engine):
    """See `Engine`. One completion has one span: a commit always falls between two calls of `generate`."""

    def __init__(
        self, *, threads: int | None = None, device: str | None = None, arithmetic: Arithmetic = "auto"
    ) -> None:
        """`threads`: CPU threads of torch, for the whole process (None: as is). `device`: None takes a GPU if any.

        `arithmetic`: "auto" is bfloat16 on a GPU and float32 on a CPU, where few have bf16 units.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        wide = arithmetic == "float32" or (arithmetic == "auto" and self.device.type == "cpu")
        self._dtype = torch.float32 if wide else torch.bfloat16
        self._model: PreTrainedModel | None = None
        self._live: LiveParameters | None = None
        self._layout: Layout | None = None
        self._staged: list[Scatter] = []
        self.version = BASE_VERSION
        self.root = b""
        self.poisoned: str | None = None

    def load(self, folder: Path, *, weights: bool = True) -> None:
        self._model = (load_model if weights else build_model)(folder, self._dtype, self.device)
        self._model.requires_grad_(False)
        self._live, self._layout, self._staged, self.poisoned = None, None, [], None

    def attach(self, layout: Layout, version: Version = BASE_VERSION, root: bytes = b"") -> None:
        self._live, self._layout = LiveParameters(self._loaded(), layout), layout
        self._staged, self.version, self.root = [], version, root

    def stage(self, patch: Patch) -> None:
        live = self._attached()
        self._refuse_if_poisoned()
        self._staged = []
        self._staged = [live.convert(name, indices, bits) for name, indices, bits in patch]

    @torch.no_grad()
    def commit(self, version: Version, root: bytes) -> float:
        self._attached()
        self._refuse_if_poisoned()
        started = time.perf_counter()
        self.poisoned = f"the commit of version {version} did not finish"  # stands unless every line below is reached
        for scatter in self._staged:
            scatter.apply()
        self._synchronize()
        self.version, self.root, self._staged = version, root, []
        self.poisoned = None
        return time.perf_counter() - started

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        model = self._loaded()
        self._refuse_if_poisoned()
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt.token_ids), []).append(i)
        done: dict[int, Completion] = {}
        for rows in by_length.values():
            for at in range(0, len(rows), BATCH_ROWS):
                batch = rows[at : at + BATCH_ROWS]
                done.update(zip(batch, self._batch(model, [prompts[i] for i in batch], sampling), strict=True))
        return [done[i] for i in range(len(prompts))]

    def live_hashes(self, layout: Layout) -> NDArray[np.uint8]:
        return self._attached().hashes(layout)

    @torch.no_grad()
    def reload(self, bits: Callable[[str], NDArray[Any]], version: Version, root: bytes) -> None:
        live, layout = self._attached(), self._layout
        assert layout is not None
        self.poisoned = f"the reload of version {version} did not finish"
        self._staged = []
        for spec in layout.tensors:
            live.write(spec.name, bits(spec.name))
        self._synchronize()
        self.version, self.root, self.poisoned = version, root, None

    def _batch(self, model: PreTrainedModel, prompts: list[Prompt], sampling: SamplingParams) -> list[Completion]:
        ids = torch.tensor([p.token_ids for p in prompts], dtype=torch.int64)
        vocabulary = len(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"prompt: a token id outside 0 to {vocabulary - 1}")
        uniform = torch.from_numpy(uniforms(sampling.seed, [p.stream for p in prompts], sampling.max_tokens))
        tokens, logprobs, lengths = decode(model, ids.to(self.device), uniform.to(self.device), sampling)
        out = []
        for row, length in enumerate(lengths.tolist()):
            ids_out = tuple(tokens[row, :length].tolist())
            stopped = ids_out[-1] in sampling.stop_tokens
            out.append(
                Completion(
                    token_ids=ids_out,
                    logprobs=tuple(logprobs[row, :length].tolist()),
                    finish_reason="stop" if stopped else "length",
                    spans=(Span(self.version, 0, length),),
                )
            )
        return out

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineError("no model is loaded")
        return self._model

    def _attached(self) -> LiveParameters:
        if self._live is None:
            raise EngineError("no layout is attached")
        return self._live

    def _refuse_if_poisoned(self) -> None:
        if self.poisoned is not None:
            raise EngineError(f"poisoned, reload it: {self.poisoned}")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
