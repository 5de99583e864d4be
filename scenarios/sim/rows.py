"""Shared by the swarm scenarios: their options, the output of rows, and what counts as a failure."""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from scenarios.harness.command import json_parser
from scenarios.harness.plot import drawing
from scenarios.sim.crowd import Crowd, Step

__all__ = ["STEP", "crowd_of", "draw_ratios", "missed", "number", "parser", "row_of", "show", "to_json", "verdict"]

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
"""Columns of a printed table: each heading, and the function that returns a row's cell."""


def number(name: str, form: str) -> Callable[[Row], str]:
    """Return a function that formats this entry of a row; None and infinity become "never"."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return "never" if value is None or not math.isfinite(value) else format(value, form)

    return cell


STEP: Final[Columns] = {
    "case": lambda row: row["case"],
    "N": number("nodes", "d"),
    "B s": number("bound_s", ".2f"),
    "x B": number("ratio", ".3f"),
    "first": number("first_ratio", ".3f"),
    "median": number("median_ratio", ".3f"),
    "copies": number("copies", ".3f"),
    "duplicates": number("duplicates", ".2%"),
    "crossings": number("crossings", ".2f"),
    "missing": number("missing", "d"),
}
"""The columns of a row of `row_of`."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all swarm scenarios have."""
    options = json_parser(doc)
    options.add_argument("--up-mbit", type=float, default=200.0, help="the trainer's uplink (default 200)")
    options.add_argument("--mib", type=float, default=100.0, help="payload of a version, MiB (default 100)")
    options.add_argument("--seeds", type=int, default=1, help="number of runs; medians are printed (default 1)")
    options.add_argument("--seed", type=int, default=0, help="the first seed")
    options.add_argument(
        "--error", type=float, default=0.2, help="largest relative error of reported rates (default 0.2)"
    )
    options.add_argument(
        "--congestion", choices=("reno", "bbr"), default="reno", help="congestion control of the kernels (default reno)"
    )
    return options


def crowd_of(options: argparse.Namespace, nodes: int, **more: Any) -> Crowd:
    """Return the crowd that the options describe."""
    return Crowd(nodes, trainer_mbit=options.up_mbit, error=options.error, congestion=options.congestion, **more)


def row_of(case: str, steps: Sequence[Step], **more: Any) -> Row:
    """Return one row: medians over the steps, and the largest `missing` and `duplicates`."""

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    return {
        "case": case,
        "nodes": round(median(s.nodes for s in steps)),
        "bound_s": median(s.bound_s for s in steps),
        "seconds": median(s.seconds for s in steps),
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


def missed(rows: Iterable[Row]) -> list[str]:
    """Return a sentence for each row in which a node never got the version."""
    return [f"{row['missing']} of {row['nodes']} nodes never had the version ({row['case']})" for row in rows
            if row["missing"]]  # fmt: skip


def verdict(name: str, wrong: Sequence[str]) -> int:
    """Return a scenario's exit status: 1 if anything went wrong, with the reasons in one sentence on stderr."""
    if wrong:
        print(f"{name}: {'; '.join(wrong)}.", file=sys.stderr)
    return 1 if wrong else 0


def to_json(name: str, rows: Sequence[Row]) -> str:
    """Return one JSON object. JSON has no infinity, so infinite values become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [finite(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({"scenario": name, "rows": finite(rows)}, indent=1, allow_nan=False)


def show(name: str, rows: Sequence[Row], *, as_json: bool, columns: Columns = STEP) -> None:
    """Print the rows as JSON or as a table."""
    if as_json:
        print(to_json(name, rows))
        return
    lines = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)))


def draw_ratios(name: str, rows: Sequence[Row], plot: Path) -> None:
    """Draw the time of each row as a multiple of its bound."""
    with drawing(plot, inches=(6.4, 3.6)) as axes:
        at = range(len(rows))
        axes.bar(at, [row["ratio"] if math.isfinite(row["ratio"]) else 0.0 for row in rows], width=0.6)
        axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
        axes.set_xticks(list(at), [f"{row['case']}\nN={row['nodes']}" for row in rows])
        axes.set_ylabel("time until all have it, times the bound")
        axes.set_title(name)
