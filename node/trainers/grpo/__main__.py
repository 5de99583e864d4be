"""`python -m node.trainers.grpo`: trains in one process and prints what each step did."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, CycloptsError, Parameter

from codec.errors import UsageError

app = App(help="Train a small policy by GRPO in one process, weights moved as changed bits.")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.default
def train(
    *,
    size: str = "tiny",
    steps: Annotated[int, Parameter(help="Optimizer steps.")] = 50,
    seed: Annotated[int, Parameter(help="Fixes prompts and samples; with one thread, every bit.")] = 0,
    lr: Annotated[float | None, Parameter(help="Learning rate (default: the size's own).")] = None,
    threads: Annotated[int | None, Parameter(help="CPU threads (default: torch's choice).")] = None,
    json: Annotated[bool, Parameter(negative=(), help="Print one JSON object a step on standard output.")] = False,
    snapshots: Annotated[Path | None, Parameter(help="Save each version here, as v0000, v0001, ...")] = None,
    snapshots_from: Annotated[int, Parameter(help="The first version to save.")] = 0,
) -> int:
    """Train, and print a line a step: reward, density, loss, seconds.

    Parameters
    ----------
    size
        tiny (made in seconds), small (28M, made in minutes) or smollm2 (135M, downloaded).
    """
    if steps < 0 or seed < 0 or (threads is not None and threads < 1):
        raise UsageError("--steps and --seed cannot be negative, and --threads is at least 1.")
    # Imported here, so that --help does not wait for torch.
    from node.engines.transformers import TransformersEngine
    from node.trainers.grpo.loop import LoopStats, train_in_process
    from node.trainers.grpo.sizes import make_trainer

    engine = TransformersEngine(threads=threads)
    base, trainer = make_trainer(size, seed=seed, lr=lr, progress=_progress)

    def save(version: int) -> None:
        if snapshots is not None and version >= snapshots_from:
            trainer.save(snapshots / f"v{version:04d}")

    def report(stats: LoopStats) -> None:
        t = stats.train
        if json:
            row = msgspec.structs.asdict(stats)
            print(msgspec.json.encode(msgspec.structs.asdict(row.pop("train")) | row).decode(), flush=True)
            return
        print(
            f"step {t.step:3d}  reward {t.reward:.3f}  density {t.density:.2%}  loss {t.loss:+.4f}  "
            f"grad {t.grad_norm:.2f}  clipped {t.clipped:.1%}  {stats.seconds:.2f} s "
            f"(sample {stats.sample_s:.2f}, train {t.seconds:.2f}, move {stats.move_s:.3f}, pause {stats.pause_s:.4f})",
            flush=True,
        )

    save(0)
    for stats in train_in_process(trainer, engine, base, steps):
        report(stats)
        save(stats.train.step)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments` (default: this process's). Returns the exit code."""
    try:
        return (
            app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, result_action="return_value")
            or 0
        )
    except CycloptsError:
        return 2  # cyclopts has printed the error
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
