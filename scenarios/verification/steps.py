"""Makes real GRPO steps of a small pretrained model, and keeps of each step the bits that changed.

The model is SmolLM2-135M-Instruct, trained by `node.trainers.grpo` to write short sentences
(`scenarios.verification.task`), with samples of its own transformers engine. Each learning rate is a run of its own.
A run that was stopped goes on from its last saved state.

    python -m scenarios.verification.steps ~/steps                            # 50 steps at 1e-6, 3e-6 and 1e-5
    python -m scenarios.verification.steps ~/steps --lr 1e-6 --steps 60       # one learning rate; goes on where it was

At 135 million parameters and 24 samples a step, a step takes about 25 s of one CPU core and, at 1e-6, 1.4 MB of
the folder; 50 steps take some 20 minutes. The optimizer's state takes 1.6 GB there.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError
from node.status.progress import ProgressLine
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["RATES", "apply_steps", "kept_steps", "make_steps", "run_folder"]

RATES: Final = (1e-6, 3e-6, 1e-5)
SAVE_EVERY: Final = 10
"""Steps between two saved optimizer states: writing one takes seconds."""
STATE: Final = "state.pt"


def run_folder(cache: Path, size: str, lr: float) -> Path:
    """Where the run of a model at a learning rate is kept."""
    return cache / f"{size}-{lr:g}"


def _file(run: Path, step: int) -> Path:
    return run / f"step_{step:04d}.npz"


def kept_steps(run: Path) -> int:
    """How many steps of a run are kept, without a gap from the first."""
    step = 0
    while _file(run, step + 1).exists():
        step += 1
    return step


def apply_steps(bits: dict[str, NDArray[np.uint16]], run: Path, steps: Sequence[int]) -> None:
    """Write the changes of steps that follow one another into `bits`: flat uint16 arrays in the layout's order.

    Raises `UsageError` when a step is missing, or is one of another model.
    """
    ends = np.cumsum([len(values) for values in bits.values()])
    for step in steps:
        try:
            with np.load(_file(run, step)) as kept:
                at, new = np.cumsum(kept["gaps"], dtype=np.int64), kept["bits"]
        except FileNotFoundError as error:
            raise UsageError(f"{run} has no step {step}: run `python -m scenarios.verification.steps`.") from error
        if len(at) and at[-1] >= ends[-1]:
            raise UsageError(f"{run}: step {step} is one of another model.")
        start = 0
        for values, first, end in zip(
            bits.values(), np.searchsorted(at, ends - np.diff(ends, prepend=0)), ends, strict=True
        ):
            last = int(np.searchsorted(at, end))
            values[at[first:last] - start] = new[first:last]
            start = int(end)


def _changes(
    held: dict[str, NDArray[np.uint16]], trainer: Any
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.uint16]]]:
    """The changes from `held` to the trainer's policy, by tensor. Updates `held`."""
    for name, bits in trainer.policy_bits():
        indices = np.flatnonzero(bits != held[name])
        held[name][indices] = bits[indices]
        yield name, indices, bits[indices]


def _keep(
    run: Path, step: int, patch: Sequence[tuple[str, NDArray[np.int64], NDArray[np.uint16]]], trainer: Any
) -> int:
    """Write a step's changes; returns the bytes of the file."""
    starts = dict(zip((spec.name for spec in trainer.layout.tensors), _starts(trainer), strict=True))
    at = np.concatenate([starts[name] + indices for name, indices, _ in patch])
    gaps = np.diff(at, prepend=0).astype(np.uint32)
    scratch = run / "scratch.npz"
    np.savez_compressed(scratch, gaps=gaps, bits=np.concatenate([bits for _, _, bits in patch]))
    scratch.replace(_file(run, step))
    return _file(run, step).stat().st_size


def _starts(trainer: Any) -> NDArray[np.int64]:
    sizes = np.array([spec.elements for spec in trainer.layout.tensors])
    return np.cumsum(sizes) - sizes


def _save(run: Path, trainer: Any) -> None:
    import torch

    scratch = run / "scratch.pt"
    torch.save({"step": trainer.step_done, "masters": trainer._masters, "adam": trainer._adam.state_dict()}, scratch)
    scratch.replace(run / STATE)


def _restore(run: Path, trainer: Any) -> None:
    """Bring the trainer to the saved state, and drop the steps after it."""
    import torch

    if (run / STATE).exists():
        state = torch.load(run / STATE, weights_only=False)
        with torch.no_grad():
            for master, saved in zip(trainer._masters, state["masters"], strict=True):
                master.copy_(saved)
        trainer._adam.load_state_dict(state["adam"])
        trainer.step_done = state["step"]
        trainer._round()
    for step in range(trainer.step_done + 1, kept_steps(run) + 1):
        _file(run, step).unlink()


def make_steps(trainer: Any, base: Path, run: Path, steps: int, *, progress: ProgressLine) -> list[dict[str, Any]]:
    """Bring a run to `steps` steps. Returns a row for each step made now. Changes nothing when the run has them."""
    from node.engines.transformers import TransformersEngine
    from node.trainers.grpo.loop import sample

    run.mkdir(parents=True, exist_ok=True)
    if kept_steps(run) >= steps:
        return []
    _restore(run, trainer)
    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(base)
    engine.attach(trainer.layout)
    held = {name: bits.copy() for name, bits in trainer.policy_bits()}
    engine.reload(held.__getitem__, (0, trainer.step_done), b"")
    rows = []
    while trainer.step_done < steps:
        stats = trainer.step(sample(trainer, engine))
        patch = list(_changes(held, trainer))
        engine.stage(patch)
        engine.commit((0, stats.step), b"")
        size = _keep(run, stats.step, patch, trainer)
        rows.append({"step": stats.step, "reward": stats.reward, "density": stats.density, "bytes": size})
        with (run / "steps.jsonl").open("a") as log:
            log.write(json.dumps(rows[-1] | {"tokens": stats.tokens, "seconds": stats.seconds}) + "\n")
        progress.label = (
            f"{run.name}: step {stats.step} of {steps}, reward {stats.reward:.2f}, {stats.density:.2%} changed"
        )
        if stats.step % SAVE_EVERY == 0 or stats.step == steps:
            _save(run, trainer)
    return rows


def _trainer(size: str, lr: float, prompts: int, samples: int, seed: int) -> tuple[Path, Any]:
    import msgspec

    from node.trainers.grpo import SIZES, GrpoTrainer
    from scenarios.verification.task import Sentences

    chosen = SIZES[size]
    folder = chosen.folder(lambda line: print(line, file=sys.stderr, flush=True))
    config = msgspec.structs.replace(chosen.config, lr=lr, prompts=prompts, samples=samples, rows=12)
    task = Sentences.of(folder) if size == "smollm2" else chosen.task(folder)
    return folder, GrpoTrainer(folder, task, config, seed=seed, device="cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("cache", type=Path, help="the folder that keeps the steps; made if it is missing")
    parser.add_argument("--lr", type=float, nargs="+", default=RATES, help="learning rates (default 1e-6 3e-6 1e-5)")
    parser.add_argument("--steps", type=int, default=50, help="steps of each run (default 50)")
    parser.add_argument("--size", default="smollm2", choices=("tiny", "small", "smollm2"), help="default smollm2")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step (default 4)")
    parser.add_argument("--samples", type=int, default=6, help="samples of each prompt (default 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and samples (default 0)")
    options = parser.parse_args(arguments)
    if min(options.steps, options.prompts, options.samples - 1) < 1:
        parser.error("--steps and --prompts: at least 1; --samples: at least 2")
    import torch

    torch.set_num_threads(1)
    found = []
    for lr in options.lr:
        folder, trainer = _trainer(options.size, lr, options.prompts, options.samples, options.seed)
        run = run_folder(options.cache, options.size, lr)
        with ProgressLine(f"{run.name}: step {kept_steps(run)} of {options.steps}") as progress:
            make_steps(trainer, folder, run, options.steps, progress=progress)
        rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        last = {row["step"]: row for row in rows if row["step"] <= options.steps}
        found.append(
            {
                "run": str(run),
                "lr": lr,
                "steps": kept_steps(run),
                "density": float(np.mean([row["density"] for row in last.values()])),
                "reward_first": rows[0]["reward"],
                "reward_last": last[max(last)]["reward"],
                "bytes": sum(row["bytes"] for row in last.values()),
            }
        )
    if options.json:
        print(json.dumps({"scenario": "verification_steps", "rows": found}))
    else:
        print("run                      steps   changed a step   reward first, last       MB")
        for row in found:
            print(
                f"{Path(row['run']).name:<24} {row['steps']:>5}   {row['density']:>14.2%}   "
                f"{row['reward_first']:>12.2f}, {row['reward_last']:.2f}   {row['bytes'] / 1e6:>6.0f}"
            )
    return 0


if __name__ == "__main__":
    run_as_program(main)
