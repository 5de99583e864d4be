"""Commands on checkpoints, without a swarm: delta, apply."""

from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from codec.errors import UsageError
from node.cli.report import TRY, AsJson, offer, print_json
from node.settings.rates import MAX_MBIT

if TYPE_CHECKING:
    from node.tools.distribution import EgressPrices

__all__ = ["register"]


def delta(
    old: Path | None = None,
    new: Path | None = None,
    /,
    *,
    shapes: str | None = None,
    density: float | None = None,
    shards: int | None = None,
    up_mbit: float = 300.0,
    nodes: int = 16,
    provider: str | None = None,
    egress_usd_gb: float | None = None,
    trainer_egress_usd_gb: float | None = None,
    out: Path | None = None,
    format: tuple[str, ...] = (),
    as_json: AsJson = False,
) -> int:
    """Show what a training step costs: how much of NEW differs from OLD, and how long it takes to send that.

    With --shapes NAME instead of OLD and NEW, reckon the step of a model that you do not have: its bytes, seconds and
    host memory, from made-up samples that are really coded.

    Parameters
    ----------
    old
        Checkpoint before the step: a Hugging Face folder or a safetensors file, of any sharding.
    new
        Checkpoint after the step.
    shapes
        Reckon for this model: qwen3-1.7b, qwen3-8b, llama-3-70b or kimi-k2 (a mixture of 1 T parameters).
    density
        With --shapes: share of the elements that a step changes. Without it, 0.01.
    shards
        With --shapes: ranks of a tensor- or expert-parallel engine; says what one rank would need of model and step.
    up_mbit
        Uplink of the trainer and of each node in Mbit/s, to estimate the seconds.
    nodes
        Number of nodes, to estimate the seconds.
    provider
        Say what the traffic of the step costs, by this provider's prices over the internet: aws, gcp, gcp-standard,
        azure, clouds (a machine at each), lambda, runpod, vast or flat (a line without a price by the byte).
    egress_usd_gb
        Dollars that a node pays for each GB that it sends; replaces the provider's price.
    trainer_egress_usd_gb
        Dollars that the trainer pays for each GB that it sends. Without it, the provider's or a node's price.
    out
        File to write the delta to, for swarm-node apply.
    format
        Also say what a node with this format would receive and hold, as int4-group-e8 (seed --format, join --format);
        repeat for more.
    """
    if not 0 < up_mbit <= MAX_MBIT or not 1 <= nodes <= 1_000_000:
        raise UsageError("--up-mbit must be more than 0, and --nodes 1 or more.")
    from node.tools.prices import egress_prices

    prices = egress_prices(provider, egress_usd_gb, trainer_egress_usd_gb)
    if shapes is not None:
        if old is not None or out is not None:
            raise UsageError("--shapes reckons without checkpoints: leave out OLD, NEW and --out.")
        if format:
            raise UsageError("--format quantises OLD and NEW: leave out --shapes.")
        return _reckon(shapes, density, shards, up_mbit, nodes, prices, as_json)
    if old is None or new is None:
        raise UsageError("delta needs two checkpoints, OLD and NEW, or --shapes NAME to reckon without any.")
    if density is not None:
        raise UsageError("--density goes with --shapes; of OLD and NEW the density is measured.")
    if shards is not None:
        raise UsageError("--shards goes with --shapes: shares of ranks are reckoned, not measured.")
    return _compare(old, new, format, up_mbit, nodes, prices, out, as_json)


def _compare(
    old: Path,
    new: Path,
    formats: tuple[str, ...],
    up_mbit: float,
    nodes: int,
    prices: "EgressPrices | None",
    out: Path | None,
    as_json: bool,
) -> int:
    from codec.formats.spec import format_named
    from node.status.progress import ProgressLine
    from node.tools import delta as weights

    forms = [format_named(name) for name in formats]
    with ProgressLine(_label(f"Comparing {old.name} with {new.name}"), unit="blocks") as progress:
        report = weights.delta(old, new, up_mbit=up_mbit, nodes=nodes, prices=prices, out=out, progress=progress.update)
    found, text = report.to_dict(), weights.render(report)
    if forms:
        from node.tools import format_sizes

        with ProgressLine(_label("Quantising both")):
            sizes = format_sizes.sizes_of_step(old, new, forms)
        found |= {"formats": [row.to_dict() for row in sizes]}
        text += "\n" + format_sizes.render(sizes)
    if as_json:
        print_json(found)
    else:
        print(text)
    return 0 if report.exact else 1


def _reckon(
    shapes: str,
    density: float | None,
    shards: int | None,
    up_mbit: float,
    nodes: int,
    prices: "EgressPrices | None",
    as_json: bool,
) -> int:
    from node.status.progress import ProgressLine
    from node.tools import reckon
    from node.tools.shapes import shapes_of

    wanted = reckon.DENSITY if density is None else density
    found = shapes_of(shapes)
    with ProgressLine(_label(f"Coding samples of {shapes}")):
        reckoned = reckon.reckon(found, density=wanted, up_mbit=up_mbit, nodes=nodes, prices=prices, shards=shards)
    if as_json:
        print_json(reckoned.to_dict())
    else:
        print(reckon.render(reckoned))
    return 0


def _label(work: str) -> str:
    """What the progress line says. The first use on a machine compiles the coder, which takes some 15 seconds."""
    from codec.kernels.jit import compiled

    return work if compiled() else f"{work} (once on this machine, the coder is compiled first)"


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

    with ProgressLine(_label(f"Applying {delta.name}"), unit="blocks") as progress:
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
        "swarm-node delta --shapes kimi-k2 --nodes 64 --up-mbit 1000",
        "swarm-node delta --shapes kimi-k2 --shards 64",
        "swarm-node delta --shapes qwen3-8b --provider vast --trainer-egress-usd-gb 0.09",
    )
    offer(app, apply, TRY, "swarm-node apply runs/step_16 step_17.delta again/step_17")
