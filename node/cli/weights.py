"""Commands on checkpoints, without a swarm: delta, apply."""

from pathlib import Path

from cyclopts import App

from codec.errors import UsageError
from node.cli.report import TRY, AsJson, offer, print_json
from node.settings.config import MAX_MBIT

__all__ = ["register"]


def delta(
    old: Path,
    new: Path,
    /,
    *,
    up_mbit: float = 300.0,
    nodes: int = 16,
    out: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Show what a training step costs: how much of NEW differs from OLD, and how long it takes to send that.

    Parameters
    ----------
    old
        Checkpoint before the step: a Hugging Face folder or a safetensors file, of any sharding.
    new
        Checkpoint after the step.
    up_mbit
        Uplink of the trainer and of each node in Mbit/s, to estimate the seconds.
    nodes
        Number of nodes, to estimate the seconds.
    out
        File to write the delta to, for swarm-node apply.
    """
    if not 0 < up_mbit <= MAX_MBIT or not 1 <= nodes <= 1_000_000:
        raise UsageError("--up-mbit must be more than 0, and --nodes 1 or more.")
    from node.status.progress import ProgressLine
    from node.tools import delta as weights

    with ProgressLine(f"Comparing {old.name} with {new.name}", unit="blocks") as progress:
        report = weights.delta(old, new, up_mbit=up_mbit, nodes=nodes, out=out, progress=progress.update)
    if as_json:
        print_json(report.to_dict())
    else:
        print(weights.render(report))
    return 0 if report.exact else 1


def apply(base: Path, delta: Path, out: Path, /, *, as_json: AsJson = False) -> None:
    """Write OUT: the checkpoint BASE with DELTA applied, proven bit for bit by its hash.

    Parameters
    ----------
    base
        The checkpoint that the delta was made from.
    delta
        The file that swarm-node delta --out wrote.
    out
        Folder to make; it must not exist.
    """
    from node.status.progress import ProgressLine
    from node.tools import delta as weights

    with ProgressLine(f"Applying {delta.name}", unit="blocks") as progress:
        root = weights.apply(base, delta, out, progress=progress.update)
    if as_json:
        print_json({"out": str(out), "root": root.hex()})
    else:
        print(f"{out} holds {root.hex()[:16]}, the root that the delta names.")


def register(app: App) -> None:
    offer(
        app,
        delta,
        TRY,
        "swarm-node delta runs/step_16 runs/step_17",
        "swarm-node delta old.safetensors new.safetensors --up-mbit 200 --nodes 32 --json",
        "swarm-node delta runs/step_16 runs/step_17 --out step_17.delta",
    )
    offer(app, apply, TRY, "swarm-node apply runs/step_16 step_17.delta again/step_17")
