"""The reference engine: a Hugging Face `transformers` model, on a GPU or on a CPU.

A commit is one `index_copy_` a tensor. Prompts of equal length are batched; there is no paging and no prefix cache.
vLLM is the fast engine, and this one defines what is correct.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from codec.checkpoint import Checkpoint
from codec.layout import Layout
from codec.routes import RouteShape
from node.engines.adapters import GivenAdapter
from node.engines.arithmetic import class_label
from node.engines.base import (
    ABILITIES,
    BASE_VERSION,
    IMAGES,
    PORTABLE_DRAWS,
    REPLAYS,
    ROUTES,
    STRUCTURES,
    Completion,
    DrawnTokens,
    EngineError,
    Prompt,
    SamplingParams,
    Version,
)
from node.engines.cohort import Cohort, judge, score
from node.engines.constraints import can_constrain
from node.engines.device import usable_device
from node.engines.forced import replay
from node.engines.interface import InProcessEngine, SteppedEngine, TensorChanges
from node.engines.invariance import rows_alike
from node.engines.judgement import Claim, Judgement
from node.engines.live import DevicePatch, LiveParameters
from node.engines.load import build_model, chosen_dtype, load_model
from node.engines.lora import Adapters, LiveAdapter
from node.engines.routing import recordable
from node.engines.rows import can_cache
from node.engines.texts import TokenizerFile
from node.engines.undo import MOST_SHARE, Undo
from node.engines.vllm.plugin.swarm_vllm.fingerprint import device_name, fingerprint
from node.verification.classes import KEEPS_KEYS

__all__ = ["Arithmetic", "Carry", "TransformersEngine"]

Arithmetic = Literal["auto", "bfloat16", "float16", "float32"]
"""The dtype in which the model computes, as `from_pretrained(dtype=...)` would load the checkpoint. Where that rounds,
patches are rounded in the same way (`node.engines.live`)."""

Carry = Literal["recompute", "stale"]
"""What becomes of the KV cache of running sequences at a commit. "recompute": their text is read again under the new
bits, so each token's log-probability is exactly its version's, and another node can check it. "stale": the cache is
kept, as some trainers do; that saves one pass over the text, and no node can recompute the later tokens."""

BATCH_ROWS: Final = 128
"""Rows sampled together. More rows gain nothing on a CPU, and the KV cache stays small."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """`parts`: its cohorts, each with the indices of its rows among the flight's prompts. `adapter`: empty: none."""

    parts: list[tuple[Cohort, list[int]]]
    adapter: str


class TransformersEngine(InProcessEngine, SteppedEngine):
    """See `InProcessEngine` and `SteppedEngine`. Also a `ScoringEngine` and a `JudgingEngine`."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        device: str | None = None,
        arithmetic: Arithmetic = "auto",
        carry: Carry = "recompute",
    ) -> None:
        """`threads`: CPU threads of torch, for the whole process (None: torch's choice). `device`: its name in torch;
        None: a GPU if there is one.

        `arithmetic`: "auto" is the dtype that the base's config names on a GPU (float32 where it names none), and
        float32 on a CPU, because few CPUs have bf16 units.
        """
        self._carry: Carry = carry
        self._flights: dict[int, _Flight] = {}
        self._lost: dict[int, str] = {}
        """By flight: why it cannot be continued."""
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._arithmetic: Arithmetic = arithmetic
        self.kind = f"transformers/{arithmetic}/{self.device.type}"
        lacks = {PORTABLE_DRAWS: self.device.type == "mps", STRUCTURES: not can_constrain()}
        self._abilities = ABILITIES - {
            IMAGES,
            REPLAYS,
            ROUTES,
            *(ability for ability, is_lacking in lacks.items() if is_lacking),
        }
        """Whatever is loaded. MPS has no float64."""
        self.abilities = self._abilities
        self._measured = False
        """`measure` has run for the loaded model."""
        self._shape: RouteShape | None = None
        """Of the loaded model's routes; None: it has none that can be recorded, or it was not measured."""
        self._dtype = torch.float32
        self._texts = TokenizerFile(None)
        self._folder: Path | None = None
        """Where the weights were loaded from; None: only the config was."""
        self._model: PreTrainedModel | None = None
        self._live: LiveParameters | None = None
        self._adapters: Adapters | None = None
        self._adapters_alike: dict[tuple[tuple[str, int], ...], bool] = {}
        """By shape of adapter: whether a row's bits do not depend on its batch. Measured for the first replay."""
        self._layout: Layout | None = None
        self._staged: list[DevicePatch] = []
        self._staged_undo: tuple[Undo, int] | None = None
        """Leads back over the staged commit, if live parameters were written as often as this before it."""
        self._undo: Undo | None = None
        """Leads back over the last commit; None: it is not known, or too large."""
        self._writes = 0
        """How often live parameters were written."""
        self._weights = threading.Lock()
        """Held while the live parameters are not the version's, or another thread reads them."""
        self._cached: bool | None = None
        """Whether the model can generate with a cache; None: not tried yet."""
        self.version = BASE_VERSION
        self.root = b""
        self.poisoned: str | None = None

    def load(self, folder: Path, *, weights: bool = True) -> None:
        self.abilities, self._measured, self._shape = self._abilities, False, None
        self._dtype = chosen_dtype(folder, self._arithmetic, self.device)
        self._model = (load_model if weights else build_model)(folder, self._dtype, self.device)
        self._model.requires_grad_(False)
        self._folder = folder if weights else None
        self._texts = TokenizerFile(folder / "tokenizer.json")
        self._live, self._layout, self._staged, self.poisoned = None, None, [], None
        self._adapters, self._adapters_alike = None, {}
        self._staged_undo = self._undo = None
        self._cached = None
        self._flights.clear()

    def attach(self, layout: Layout, version: Version = BASE_VERSION, root: bytes = b"") -> None:
        live = LiveParameters(self._loaded(), layout, self._dtype)
        if self._folder is not None and live.kept:
            checkpoint = Checkpoint.open(self._folder)
            for name in live.kept:
                live.write(name, checkpoint.bits(name))
        if self._adapters is not None:
            self._adapters.clear()
        self._adapters = Adapters(self._loaded(), layout, self._dtype)
        self._live, self._layout = live, layout
        self._staged, self._staged_undo, self._undo = [], None, None
        self.version, self.root = version, root

    def reload_replica(self, version: Version, root: bytes) -> bytes:
        held = super().reload_replica(version, root)
        self.measure()
        return held

    def measure(self) -> None:
        """Find out how this model rounds here, and name its arithmetic class and, if it can, `REPLAYS` and `ROUTES`.

        Call it when the weights are there. A second call for the same model does nothing: the kernels are the same.
        """
        if self._measured:
            return
        model = self._loaded()
        self._refuse_if_poisoned()
        alike = rows_alike(model, cached=self._can_cache())
        attention = str(getattr(model.config, "_attn_implementation", None) or "plain")
        label = class_label(
            "transformers",
            transformers.__version__,
            device_name(self.device),
            str(self._dtype).removeprefix("torch."),
            (KEEPS_KEYS if self._carry == "stale" else "") + ("" if alike else "loose-") + attention,
            1,
            fingerprint(self.device, self._dtype),
        )
        self._shape = recordable(model)
        found = {REPLAYS: alike, ROUTES: self._shape is not None}
        self.abilities = self._abilities | {label, *(ability for ability, able in found.items() if able)}
        self._measured = True

    def _can_cache(self) -> bool:
        if self._cached is None:
            self._cached = can_cache(self._loaded())
        return self._cached

    def stage(self, changes: Iterable[TensorChanges]) -> None:
        live = self._attached()
        self._refuse_if_poisoned()
        self._staged, self._staged_undo = [], None
        staged, undo, writes = [], Undo(int(MOST_SHARE * live.nbytes)), self._writes
        for name, indices, bits in changes:
            staged.append(live.prepare(name, indices, bits))
            with self._weights:
                undo.add(staged[-1])
        self._staged, self._staged_undo = staged, (undo, writes)

    @torch.no_grad()
    def commit(self, version: Version, root: bytes) -> float:
        self._attached()
        self._refuse_if_poisoned()
        started = time.perf_counter()
        self.poisoned = f"the commit of version {version} did not finish"  # stays unless every line below is reached
        undo, writes = self._staged_undo or (None, 0)
        self._staged_undo = self._undo = None
        with self._weights:
            before, self._writes = self._writes, self._writes + 1
            for patch in self._staged:
                patch.write()
            self._synchronize()
        self.version, self.root, self._staged = version, root, []
        self._undo = undo if undo is not None and undo.complete and writes == before else None
        self.poisoned = None
        if self._carry == "recompute":
            for cohort, _ in self._cohorts():
                cohort.refresh()
        return time.perf_counter() - started

    # ------------------------------------------------------------ adapters

    def stage_adapter(self, adapter: GivenAdapter) -> bytes:
        self._attached()
        self._refuse_if_poisoned()
        assert self._adapters is not None
        return self._adapters.stage(adapter)

    def switch_adapter(self, slot: int) -> float:
        """See `Engine`. The matrices that were staged take the place of those before."""
        started = time.perf_counter()
        assert self._adapters is not None
        before, after = self._adapters.switch(slot), self._adapters.at(slot)
        if before is not None and before.name != after.name:
            self._fail_flights(before)
        if self._carry == "recompute":
            for cohort, adapter in self._cohorts():
                if adapter == after.name:
                    cohort.refresh()
        return time.perf_counter() - started

    def drop_adapter(self, slot: int) -> None:
        if self._adapters is not None and (before := self._adapters.drop(slot)) is not None:
            self._fail_flights(before)

    def _fail_flights(self, adapter: LiveAdapter) -> None:
        for number, flight in list(self._flights.items()):
            if flight.adapter == adapter.name:
                self._lost[number] = f"the adapter {adapter.name} was removed"

    def adapter_root(self, slot: int) -> bytes:
        self._attached()
        assert self._adapters is not None
        return self._adapters.at(slot).root()

    def version_of(self, adapter: str) -> Version:
        if self._adapters is None:
            return super().version_of(adapter)
        found = self._adapters.named(adapter)
        return self.version if found is None else max(self.version, found.version)

    @contextmanager
    def _using(self, adapter: str) -> Iterator[PreTrainedModel]:
        """The model, computing with this adapter while the block runs. Raises `EngineError` for an unknown one."""
        model = self._loaded()
        if self._adapters is None:
            if adapter:
                raise EngineError(f"this engine does not hold the adapter {adapter}")
            yield model
            return
        with self._adapters.using(adapter):
            yield model

    # ------------------------------------------------------------ generating

    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> None:
        model = self._loaded()
        self._refuse_if_poisoned()
        self.version_of(adapter)
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt.token_ids), []).append(i)
        most = 1 if sampling.extra.exact else BATCH_ROWS  # the rounding of matrix kernels depends on the number of rows
        parts = [rows[at : at + most] for rows in by_length.values() for at in range(0, len(rows), most)]
        cached = self._can_cache()
        tokenizer = self._texts.read() if sampling.extra.stop_texts else None
        shape = self._route_shape(model) if sampling.extra.routes else None
        more = {"cached": cached, "tokenizer": tokenizer, "shape": shape, "texts": self._texts.path}
        cohorts = [(Cohort(model, [prompts[i] for i in rows], sampling, **more), rows) for rows in parts]
        self._flights[flight] = _Flight(cohorts, adapter)

    def new_tokens(self, flight: int) -> list[tuple[int, DrawnTokens]]:
        found = self._flights.get(flight)
        parts = () if found is None else found.parts
        return [(rows[row], drawn) for cohort, rows in parts for row, drawn in cohort.new_tokens()]

    def _route_shape(self, model: PreTrainedModel) -> RouteShape:
        self._shape = self._shape or recordable(model)
        if self._shape is None:
            raise ValueError("routes: this model has no experts whose choice can be recorded")
        return self._shape

    def step(self) -> list[tuple[int, list[Completion] | EngineError]]:
        self._refuse_if_poisoned()
        lost, self._lost = self._lost, {}
        out: list[tuple[int, list[Completion] | EngineError]] = [
            (number, EngineError(why)) for number, why in lost.items() if self._flights.pop(number, None) is not None
        ]
        for cohort, adapter in self._cohorts():
            if not cohort.done:
                with self._using(adapter):
                    cohort.step(self.version_of(adapter))
        done = [number for number, f in self._flights.items() if all(cohort.done for cohort, _ in f.parts)]
        return out + [(number, self._collect(self._flights.pop(number).parts)) for number in done]

    def cancel(self, flight: int) -> None:
        self._flights.pop(flight, None)
        self._lost.pop(flight, None)

    def counts(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, flight in self._flights.items():
            pairs = [pair for cohort, rows in flight.parts for pair in zip(rows, cohort.counts, strict=True)]
            found[number] = [count for _, count in sorted(pairs)]
        return found

    def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[float, ...]:
        self._refuse_if_poisoned()
        with self._using(adapter) as model:
            return score(model, prompt, token_ids, sampling)

    @torch.inference_mode()
    def judge(self, claims: Sequence[Claim]) -> list[Judgement | Exception]:
        model = self._loaded()
        self._refuse_if_poisoned()
        judged: list[Judgement | Exception] = [ValueError("claim: not judged")] * len(claims)
        for name in dict.fromkeys(claim.adapter for claim in claims):
            members = [i for i, claim in enumerate(claims) if claim.adapter == name]
            for i, found in zip(members, self._judge_by(name, [claims[i] for i in members]), strict=True):
                judged[i] = found
        wanted = [
            i
            for i, found in enumerate(judged)
            if isinstance(found, Judgement) and claims[i].previous and not claims[i].adapter
        ]
        if wanted and self._undo is not None:
            previous = self._score_before(model, self._undo, [claims[i] for i in wanted])
            for i, scores in zip(wanted, previous, strict=True):
                judged[i] = _with_previous(judged[i], scores)
        return judged

    def _judge_by(self, adapter: str, claims: list[Claim]) -> list[Judgement | Exception]:
        """Judge claims that were all drawn by this adapter."""
        try:
            with self._using(adapter) as model:
                replays = iter(self._replay(model, [claim for claim in claims if claim.replay]))
                return [next(replays) if claim.replay else self._judge_now(model, claim) for claim in claims]
        except EngineError as error:  # an adapter that was dropped
            return [error] * len(claims)

    def _judge_now(self, model: PreTrainedModel, claim: Claim) -> Judgement | Exception:
        try:
            scores, margins = judge(model, claim)
            return Judgement(self.version_of(claim.adapter), scores[claim.start :], margins=margins[claim.start :])
        except (ValueError, RuntimeError) as error:  # a text that the model cannot read, or too little memory for it
            return error

    def _replay(self, model: PreTrainedModel, claims: list[Claim]) -> list[Judgement | Exception]:
        if not claims:
            return []
        if REPLAYS not in self.abilities or not self._alike(model, claims[0].adapter):
            return [ValueError("this engine cannot replay tokens")] * len(claims)
        version = self.version_of(claims[0].adapter)
        return [
            found if isinstance(found, Exception) else _judgement(version, *found)
            for found in replay(model, claims, cached=self._can_cache())
        ]

    def _alike(self, model: PreTrainedModel, name: str) -> bool:
        """Whether a row's bits do not depend on its batch with this adapter, which the model computes with now."""
        adapter = None if self._adapters is None else self._adapters.named(name)
        if adapter is None:
            return True
        if adapter.shape not in self._adapters_alike:
            self._adapters_alike[adapter.shape] = rows_alike(model, cached=self._can_cache())
        return self._adapters_alike[adapter.shape]

    def _score_before(self, model: PreTrainedModel, undo: Undo, claims: Sequence[Claim]) -> list[tuple[float, ...]]:
        """Score the claims under the version before, in one rewind.

        Any exception leaves the engine poisoned.
        """
        with self._weights:
            try:
                with undo.undone():
                    return [
                        score(model, claim.prompt, claim.token_ids, claim.sampling)[claim.start :] for claim in claims
                    ]
            except BaseException as error:  # not before the rewind: patches may be staged meanwhile
                self.poisoned = f"tokens were scored under the version before, and that failed: {error}"
                raise

    def live_hashes(self, layout: Layout) -> NDArray[np.uint8]:
        return self._attached().hashes(layout)

    @property
    def unreadable(self) -> str:
        if self.device.type == "cpu":
            return ""
        return f"its weights are on a device ({self.device.type}) from which reading them back has not been proven"

    def read_blocks(self, blocks: Sequence[int], window: NDArray[np.uint8]) -> None:
        if self.unreadable:
            raise EngineError(self.unreadable)
        live, layout = self._attached(), self._layout
        assert layout is not None
        with self._weights:
            live.fill_window(layout, blocks, window)

    @torch.no_grad()
    def reload(self, bits: Callable[[str], NDArray[Any]], version: Version, root: bytes) -> None:
        live, layout = self._attached(), self._layout
        assert layout is not None
        self.poisoned = f"the reload of version {version} did not finish"
        self._staged, self._staged_undo, self._undo = [], None, None
        self._flights.clear()  # it is unknown whether the weights that they were drawn from were their version's
        with self._weights:
            self._writes += 1
            for spec in layout.tensors:
                live.write(spec.name, bits(spec.name))
            self._synchronize()
        self.version, self.root, self.poisoned = version, root, None

    def _cohorts(self) -> list[tuple[Cohort, str]]:
        """(cohort, its adapter) of every flight."""
        return [(cohort, flight.adapter) for flight in self._flights.values() for cohort, _ in flight.parts]

    @staticmethod
    def _collect(parts: list[tuple[Cohort, list[int]]]) -> list[Completion]:
        by_index = {
            i: completion for cohort, rows in parts for i, completion in zip(rows, cohort.completions(), strict=True)
        }
        return [by_index[i] for i in range(len(by_index))]

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


def _judgement(version: Version, scores: tuple[float, ...], margins: tuple[float, ...]) -> Judgement | Exception:
    try:
        return Judgement(version, scores, margins=margins)
    except ValueError as error:  # weights that give no numbers
        return error


def _with_previous(judgement: Judgement | Exception, scores: tuple[float, ...]) -> Judgement | Exception:
    assert isinstance(judgement, Judgement)
    try:
        return Judgement(judgement.version, judgement.scores, scores, judgement.margins)
    except ValueError as error:
        return error
