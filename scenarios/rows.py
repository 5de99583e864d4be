"""What the swarm scenarios share: their options, and how a row of results is printed."""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from scenarios.crowd import Crowd, Step
from scenarios.plot import drawing

__all__ = ["crowd_of", "parser", "print_rows", "row_of", "show"]

HEAD: Final = ("case", "N", "B s", "x B", "first", "median", "copies", "duplicates", "crossings", "missing")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--up-mbit", type=float, default=200.0, help="the trainer's uplink (default 200)")
    made.add_argument("--mib", type=float, default=100.0, help="payload of a version, MiB (default 100)")
    made.add_argument("--seeds", type=int, default=1, help="runs, of which medians are printed (default 1)")
    made.add_argument("--seed", type=int, default=0, help="the first seed")
    made.add_argument("--error", type=float, default=0.2, help="how wrong known bandwidths are (default 0.2)")
    made.add_argument("--congestion", choices=("reno", "bbr"), default="reno", help="what kernels do (default reno)")
    made.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return made


def crowd_of(options: argparse.Namespace, nodes: int, **more: Any) -> Crowd:
    """The crowd that the options describe."""
    return Crowd(nodes, trainer_mbit=options.up_mbit, error=options.error, congestion=options.congestion, **more)


def row_of(case: str, steps: Sequence[Step], **more: Any) -> dict[str, Any]:
    """One row: medians over the steps; the worst of missing and duplicates."""

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    return {
        "case": case,
        "nodes": round(median(s.nodes for s in steps)),
        "bound_s": median(s.bound_s for s in steps),
        "ratio": median(s.ratio for s in steps),
        "first_ratio": median(s.first_s / s.bound_s for s in steps),
        "median_ratio": median(s.median_s / s.bound_s for s in steps),
        "copies": median(s.copies for s in steps),
        "duplicates": max(s.duplicates for s in steps),
        "crossings": median(s.crossings for s in steps),
        "missing": max(s.missing for s in steps),
        **more,
        "steps": [asdict(s) for s in steps],
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """A table for people."""
    print("  ".join(f"{name:>10}" for name in HEAD))
    for row in rows:
        cells = (
            row["case"], str(row["nodes"]), f"{row['bound_s']:.2f}", f"{row['ratio']:.3f}", f"{row['first_ratio']:.3f}",
            f"{row['median_ratio']:.3f}", f"{row['copies']:.3f}", f"{row['duplicates']:.2%}", f"{row['crossings']:.2f}",
            str(row["missing"]),
        )  # fmt: skip
        print("  ".join(f"{cell:>10}" for cell in cells))


def show(name: str, rows: Sequence[dict[str, Any]], *, as_json: bool, plot: Path | None = None) -> None:
    """Print the rows, and draw the time of each against its bound."""
    if as_json:
        print(json.dumps({"scenario": name, "rows": list(rows)}, indent=1))
    else:
        print_rows(rows)
    if plot is not None:
        _draw(name, rows, plot)


def _draw(name: str, rows: Sequence[dict[str, Any]], plot: Path) -> None:
    with drawing(plot, inches=(6.4, 3.6)) as axes:
        at = range(len(rows))
        axes.bar(at, [row["ratio"] for row in rows], width=0.6)
        axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
        axes.set_xticks(list(at), [f"{row['case']}\nN={row['nodes']}" for row in rows])
        axes.set_ylabel("time until all have it, times the bound")
        axes.set_title(name)
