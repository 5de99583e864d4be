"""One cell of the model matrix: a family, the dtypes of its checkpoint, tied or not; it publishes three steps.

After each step three comparisons are made with code that publishing does not use: the node's bits with what the model's
own `save_pretrained` writes (in the checkpoint's dtypes), the engine's live tensors with those of a model that
`from_pretrained` loads from the node's bits, and the engine's greedy tokens and log-probabilities with those of that
model, computed for each token without a cache.
"""

import copy
import gc
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from codec import Checkpoint, write_checkpoint
from codec.errors import UsageError
from node.engines.base import Prompt, SamplingParams
from node.engines.transformers import TransformersEngine
from node.models.dtypes import TORCH_DTYPES
from scenarios.conformance.families import tiny
from scenarios.conformance.swarm import LocalSwarm

__all__ = ["STEPS", "STORED", "Cell", "change", "load_model", "run_cell", "save_base", "wrong_bits"]

STORED: Final = ("bf16", "f16", "f32", "mixed")
"""Dtypes of the checkpoint; "mixed" is bf16 with float32 norms. The trainer's model is float32, except for "mixed",
where it is what `from_pretrained(dtype=bfloat16)` returns."""
STEPS: Final = ("1 %", "everything", "nothing")
PROMPTS: Final = ((1, 5, 9, 12, 7), (3, 4, 8, 20, 31))
NEW_TOKENS: Final = 6
LOGPROB_ATOL: Final = 2e-4
"""Tolerance between forward passes with and without a cache in float32, which sum in another order. A wrong tensor
changes log-probabilities by orders of magnitude more."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one cell.

    `outcome`: "exact", "bits" (published and live bits are exact, but the engine cannot generate: see `why`), "refused"
    (before anything was published), "not built", "same" (the same model as with the other `tied`), or "WRONG".
    """

    family: str
    stored: str
    tied: bool
    outcome: str
    why: str = ""
    tensors: int = 0
    fused: int = 0


def run_cell(family: str, stored: str, *, tied: bool, folder: Path) -> Cell:
    """Run one cell. `folder`: an empty folder, which is emptied again afterwards."""
    try:
        return _run(family, stored, tied, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        gc.collect()


def _run(family: str, stored: str, tied: bool, folder: Path) -> Cell:
    def cell(outcome: str, why: object = "", **counts: int) -> Cell:
        return Cell(family, stored, tied, outcome, " ".join(str(why).split())[:300], **counts)

    try:
        base = save_base(tiny(family, tied=tied), stored, tied, folder / "base")
        trainer = load_model(base, torch.bfloat16 if stored == "mixed" else torch.float32)
    except Exception as error:  # any error of the library goes into the table
        return cell("not built", f"{type(error).__name__}: {error}")
    if base is None:
        return cell("same", "the family ties them, or does not, whatever its config says")
    try:
        swarm = LocalSwarm(base, trainer)
    except UsageError as error:
        return cell("refused", error)
    try:
        try:
            engine = swarm.join(folder / "joined")
            halves = swarm.join(folder / "halves", "bfloat16")
        except UsageError as error:
            return cell("refused", f"join: {error}")
        counts = {"tensors": len(swarm.layout.tensors), "fused": _fused(trainer, swarm)}
        able, note = _generates(engine)
        for step in STEPS:
            change(trainer, step)
            swarm.publish(trainer)
            wrong = _compare(swarm, trainer, engine, halves, folder / "step", able)
            if wrong:
                return cell("WRONG", f"{step}: {wrong}", **counts)
        note = note or _alters(swarm, folder / "step")
        return cell("exact" if able else "bits", note, **counts)
    finally:
        swarm.close()


def _alters(swarm: LocalSwarm, folder: Path) -> str:
    altered = _altered(swarm, folder / "fresh", folder / "once more")
    return (
        f"from_pretrained itself changes {min(altered)} as it loads it; live is what was published" if altered else ""
    )


def save_base(config: Any, stored: str, tied: bool, folder: Path) -> Path | None:
    """Write a checkpoint folder as a user has it. None: the family ignores this value of `tied`."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    shared = outputs is not None and inputs is not None and outputs.weight is inputs.weight
    if shared != tied:
        return None
    change(model, "everything")  # norms of ones and biases of zeros would hide a mistake
    if stored in ("bf16", "mixed"):
        model.to(torch.bfloat16)
    elif stored == "f16":
        model.to(torch.float16)
    if stored == "mixed":
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.data = parameter.data.float()
    model.save_pretrained(folder)
    return folder


def load_model(folder: Path | None, dtype: torch.dtype) -> Any:
    return None if folder is None else AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)


@torch.no_grad()
def change(model: Any, step: str) -> None:
    """Move 1 % of the elements, all, or none, by amounts that change the bits of every dtype."""
    random = torch.Generator().manual_seed(len(step))
    saved = model.state_dict()
    done: set[int] = set()
    for tensor in saved.values():
        if not tensor.is_floating_point() or step == "nothing" or tensor.data_ptr() in done:
            continue
        done.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=random) * 0.02
        if step == "1 %":
            noise *= torch.rand(tensor.shape, generator=random) < 0.01
        tensor.add_(noise.to(tensor.dtype))


def _fused(trainer: Any, swarm: LocalSwarm) -> int:
    """Count the checkpoint's tensors that are not parameters of the model, but parts of fused ones."""
    from node.models.conversion import conversion_of

    conversion = conversion_of(trainer, swarm.layout)
    return sum(conversion.plain(spec) is None for spec in swarm.layout.tensors)


def _generates(engine: TransformersEngine) -> tuple[bool, str]:
    try:
        _drawn(engine)
    except Exception as error:  # the model does not support a plain generation loop
        return False, f"{type(error).__name__}: {error}"
    return True, ""


def _drawn(engine: TransformersEngine) -> Any:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    return engine.generate([Prompt(ids) for ids in PROMPTS], sampling)


def _compare(
    swarm: LocalSwarm, trainer: Any, engine: TransformersEngine, halves: TransformersEngine, folder: Path, able: bool
) -> str:
    """Return the first difference; empty when there is none."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if wrong := wrong_bits(swarm, trainer, folder / "saved"):
        return f"the node's bits of {wrong} are not what save_pretrained writes"
    for each in (engine, halves):
        if wrong := swarm.wrong(each):
            return f"the live bits of {wrong[0]} are not proven"
    if swarm.root() != swarm.seed.root:
        return "the roots differ"
    fresh_folder = folder / "fresh"
    write_checkpoint(fresh_folder, swarm.layout, swarm.node.bits, swarm.checkpoint.files)
    altered = _altered(swarm, fresh_folder, folder / "again")
    for each, dtype in ((halves, torch.bfloat16), (engine, torch.float32)):
        fresh = load_model(fresh_folder, dtype).eval()
        if wrong := _differing(each._loaded(), fresh, altered):
            return f"{wrong} is live otherwise than from_pretrained loads it as {dtype}"
    if altered:  # the loaded weights are not the published ones, so tokens cannot be compared
        return ""
    return _wrong_tokens(engine, fresh) if able else ""


def _altered(swarm: LocalSwarm, folder: Path, again: Path) -> frozenset[str]:
    """Return the parameters that `from_pretrained` itself changes on load, through a fault in an architecture."""
    load_model(folder, torch.float32).save_pretrained(again)
    theirs = Checkpoint.open(again)
    found: set[str] = set()
    for spec in swarm.layout.tensors:
        stored = _as_float(swarm.node.bits(spec.name), spec.dtype)
        saved = _as_float(theirs.bits(spec.name), theirs.layout.tensor(spec.name).dtype)
        if not torch.equal(stored, saved):
            found |= {spec.name, *spec.aliases}
    return frozenset(found)


def _as_float(bits: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(TORCH_DTYPES[dtype]).double()


def wrong_bits(swarm: LocalSwarm, trainer: Any, folder: Path) -> str:
    """Return the first tensor whose bits at the node differ from what `save_pretrained` writes; empty: none."""
    saved = copy.deepcopy(trainer)
    saved.save_pretrained(folder)
    theirs = Checkpoint.open(folder)
    for spec in swarm.layout.tensors:
        found = theirs.layout.tensor(spec.name)
        kind = TORCH_DTYPES[found.dtype]
        tensor = torch.from_numpy(theirs.bits(spec.name).view(f"i{found.type.itemsize}").copy()).view(kind)
        wanted = tensor.to(TORCH_DTYPES[spec.dtype]).view(torch.uint8).numpy()
        if not np.array_equal(wanted, swarm.node.bits(spec.name).view(np.uint8)):
            return spec.name
    return ""


def _differing(live: Any, fresh: Any, altered: frozenset[str]) -> str:
    mine, theirs = live.state_dict(), fresh.state_dict()
    if set(mine) != set(theirs):
        return min(set(mine) ^ set(theirs))
    for name, tensor in theirs.items():
        if name in altered:
            continue
        same = mine[name].dtype == tensor.dtype and torch.equal(_bytes(mine[name]), _bytes(tensor))
        if not same:
            return name
    return ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.inference_mode()
def _wrong_tokens(engine: TransformersEngine, fresh: Any) -> str:
    for ids, made in zip(PROMPTS, _drawn(engine), strict=True):
        text = torch.tensor([ids])
        for token, logprob in zip(made.token_ids, made.logprobs, strict=True):
            logits = fresh(text, use_cache=False).logits[0, -1].float()
            wanted = torch.log_softmax(logits, -1)
            best = float(wanted.max())
            if abs(float(wanted[token]) - best) > LOGPROB_ATOL or abs(best - logprob) > LOGPROB_ATOL:
                return f"token {token} at {logprob:.5f}, a fresh model's best is {int(wanted.argmax())} at {best:.5f}"
            text = torch.cat([text, torch.tensor([[token]])], 1)
    return ""
