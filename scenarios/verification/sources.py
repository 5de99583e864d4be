"""Where the versions of a measurement come from: kept steps, or two checkpoints of the user."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from codec.errors import UsageError
from scenarios.verification.steps import kept_steps, run_folder

__all__ = ["Source", "from_checkpoints", "from_steps"]


class Source(NamedTuple):
    """`name`: of the samples' files. `version`: the one that honest nodes have; the one before is `version` - 1.
    `open`: returns (the versions, the task); it imports torch."""

    name: str
    version: int
    open: Callable[[], tuple[Any, Any]]


def from_steps(cache: Path, size: str, lr: float, version: int | None) -> Source:
    """A version of a run that `scenarios.verification.steps` made; None: the newest one.

    Raises `UsageError` when it is not there.
    """
    run = run_folder(cache, size, lr)
    if not run.is_dir():
        runs = sorted(path.name for path in cache.glob("*-*") if kept_steps(path)) if cache.is_dir() else []
        found = f"It has {', '.join(runs)}: choose with --size and --lr, or run" if runs else "Run"
        raise UsageError(
            f"{cache} has no folder {run.name}. {found} "
            f"`python -m scenarios.verification.steps {cache} --size {size} --lr {lr:g}` first."
        )
    newest = kept_steps(run)
    chosen = newest if version is None else version
    if not 1 <= chosen <= newest:
        raise UsageError(
            f"{run} has {newest} steps, so --version is 1 to {newest}. For more of them, run "
            f"`python -m scenarios.verification.steps {cache} --size {size} --lr {lr:g} --steps {max(chosen, 1)}`."
        )

    def opened() -> tuple[Any, Any]:
        from node.trainers.grpo import SIZES
        from scenarios.verification.models import Versions
        from scenarios.verification.task import Sentences

        base = SIZES[size].folder(lambda line: print(line, file=sys.stderr, flush=True))
        return Versions(base, run), Sentences.of(base) if size == "smollm2" else SIZES[size].task(base)

    return Source(run.name, chosen, opened)


def from_checkpoints(older: Path, newer: Path) -> Source:
    """Two checkpoints of one model: the newer one is honest, and the older one is the version before.

    Raises `UsageError` for folders that are not that.
    """
    from scenarios.verification.models import Checkpoints

    versions = Checkpoints(older, newer)

    def opened() -> tuple[Any, Any]:
        from scenarios.verification.task import Sentences

        return versions, Sentences.of(newer)

    return Source(versions.name, 1, opened)
