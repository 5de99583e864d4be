"""Measures the codec's size and speed against BLAKE3, memcpy, other coders and entropy bounds, on the same steps.

    python -m scenarios.bench.codec [--json] [--plot codec.png]        real steps of the reference trainer's `small`
    python -m scenarios.bench.codec --old DIR --new DIR                two checkpoints of your own
    python -m scenarios.bench.codec --shapes qwen3-8b [--share 0.05]   made-up steps of true shapes, streamed
    python -m scenarios.bench.codec --data made-up                     16 million elements, in seconds

Speeds are GB of weights per second on one core. Ours include the block hashes; the baselines, the other coders that we
compare with, have none. Bits per change count everything on the wire: payloads, block hashes, piece hashes, headers,
signatures and the manifest.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from codec.kernels.jit import compiled
from scenarios.bench.codec_data import REAL_RATES, SHAPE_NAMES, SMALL, Part, checkpoints, fabricate, real_steps, shapes
from scenarios.bench.codec_measure import Measurement, measure, scaling
from scenarios.harness.command import json_parser
from scenarios.harness.plot import drawing, png

__all__ = ["main", "report"]

PUBLISHED: Final = (
    ("SparrowRL, Qwen3-4B", 0.0112, None),
    ("SparrowRL, Qwen3-8B", 0.0096, 79),
    ("SparrowRL, Llama3-8B", 0.0256, None),
    ("SparrowRL, GLM4-9B", 0.0199, None),
    ("SparrowRL, Qwen2.5-72B", 0.0185, None),
    ("PULSE, 7B (density inferred)", 0.005, 130),
    ("SparseRL-Sync, 30B", 0.00614, 101),
    ("SparseRL-Sync, 106B (density inferred)", 0.0104, 60),
)
"""Model, share of elements that a step changes, and the published ratio of full copy to delta where there is one."""

_DENSITIES: Final = (0.001, 0.0035, 0.005, 0.01, 0.025, 0.05)


def report(found: Measurement, threads: dict[str, float] | None = None) -> dict[str, Any]:
    """Return the numbers for --json. `threads`: the speedups of `scaling`."""

    def gb_s(seconds: float) -> float:
        return found.full_bytes / 1e9 / max(seconds, 1e-9)

    hashing = gb_s(found.blake3_s)
    rows = {}
    for name, timed in found.coders.items():
        rows[name] = {
            "bits_per_change": 8 * timed.payload_bytes / max(found.changed, 1),
            "ratio": found.full_bytes / max(timed.payload_bytes, 1),
            "payload_bytes": timed.payload_bytes,
            "encode_gb_s": gb_s(timed.encode_s),
            "decode_gb_s": gb_s(timed.decode_s),
            "encode_of_blake3": gb_s(timed.encode_s) / hashing,
            "decode_of_blake3": gb_s(timed.decode_s) / hashing,
            "exact": timed.exact,
        }
    ours = rows.pop("rice")
    return {
        "density": found.changed / max(found.elements, 1),
        "elements": found.elements,
        "changed": found.changed,
        "full_bytes": found.full_bytes,
        **ours,
        "anchors": rows,
        "blake3_gb_s": hashing,
        "memcpy_gb_s": gb_s(found.memcpy_s),
        "scatter_m_changes_s": found.changed / 1e6 / max(found.scatter_s, 1e-9),
        "pco_m_changes_s": found.changed / 1e6 / max(found.pco_positions_s, 1e-9),
        "extra_memory_mb": found.peak_bytes / 1e6,
        "process_peak_mb": found.process_peak_bytes / 1e6,
        "bound_naive": found.bounds.naive(),
        "bound_conditional": found.bounds.conditional(),
        "two_threads": threads or {},
    }


def _table(title: str, row: dict[str, Any]) -> str:
    """Format one report as a text table."""
    lines = [
        f"{title}: {row['elements']:,} elements, {row['changed']:,} changed ({100 * row['density']:.3g} %)",
        f"{'':<14}{'bits/change':>12}{'ratio':>8}{'encode':>10}{'of BLAKE3':>11}{'decode':>10}{'of BLAKE3':>11}  exact",
    ]
    for name, values in {"rice (ours)": row, **row["anchors"]}.items():
        lines.append(
            f"{name:<14}{values['bits_per_change']:>12.2f}{values['ratio']:>8.0f}"
            f"{values['encode_gb_s']:>10.2f}{values['encode_of_blake3']:>11.2f}"
            f"{values['decode_gb_s']:>10.2f}{values['decode_of_blake3']:>11.2f}  {'yes' if values['exact'] else 'NO'}"
        )
    lines.append(
        f"bounds: conditional {row['bound_conditional']:.2f}, naive {row['bound_naive']:.2f} bits a change. "
        f"BLAKE3 {row['blake3_gb_s']:.2f}, memcpy {row['memcpy_gb_s']:.1f} GB/s. "
        f"Scatter {row['scatter_m_changes_s']:.0f}, pco to positions {row['pco_m_changes_s']:.0f} M changes/s. "
        f"Extra memory {row['extra_memory_mb']:.0f} MB, all of the process {row['process_peak_mb']:.0f} MB at most."
    )
    if row["two_threads"]:
        sped = row["two_threads"]
        lines.append(
            f"two threads: encode x{sped['encode']:.2f}, decode x{sped['decode']:.2f}, BLAKE3 x{sped['blake3']:.2f}"
        )
    return "\n".join(lines)


def _published(repeats: int) -> list[dict[str, Any]]:
    """Return our bits and ratio at each published density, on made-up steps, beside the published ratio."""
    rows = []
    for name, density, ratio in PUBLISHED:
        row = report(measure(fabricate(SMALL, density, share=0.5), 1 << 30, repeats))
        ours = {"bits_per_change": row["bits_per_change"], "ratio": 16 / (row["bits_per_change"] * density)}
        rows.append({"who": name, "density": density, "published_ratio": ratio, **ours})
    return rows


def _plot(path: Path, measured: list[dict[str, Any]], repeats: int) -> None:
    """Plot bits per change against density, with both bounds, and the measured steps as dots."""
    curve = [report(measure(fabricate(SMALL, density, share=0.5), 1 << 30, repeats)) for density in _DENSITIES]
    with drawing(path, inches=(7, 4.5)) as axes:
        densities = [100 * row["density"] for row in curve]
        for label, key in (("rice (ours)", "bits_per_change"), ("naive bound", "bound_naive")):
            axes.plot(densities, [row[key] for row in curve], "-" if key == "bits_per_change" else "--", label=label)
        axes.plot(densities, [row["bound_conditional"] for row in curve], ":", label="conditional bound")
        for name in curve[0]["anchors"]:
            axes.plot(densities, [row["anchors"][name]["bits_per_change"] for row in curve], label=name)
        for key, marker, label in (("bits_per_change", "ko", "ours"), ("bound_conditional", "k_", "conditional bound")):
            dots = [row[key] for row in measured]
            axes.plot([100 * row["density"] for row in measured], dots, marker, label=f"{label}, as measured")
        axes.set(xscale="log", xlabel="changed elements, % (lines: made-up steps)", ylabel="bits a changed element")
        axes.set(ylim=(0, 32))
        axes.legend(loc="center right", bbox_to_anchor=(1, 0.5), ncols=2, fontsize=8)


def _sources(options: argparse.Namespace) -> dict[str, tuple[Iterable[Part], int]]:
    """Map each title to its parts and the expected payload in bytes."""
    if (options.old is None) != (options.new is None):
        raise UsageError("Give both --old and --new, or neither.")
    if options.old is not None:
        parts = list(checkpoints(options.old, options.new))
        return {f"{options.old} -> {options.new}": (parts, sum(part.old.nbytes for part in parts) // 220)}
    if options.shapes is not None or options.data == "made-up":
        name = options.shapes or SMALL
        parts = fabricate(name, options.density, share=options.share)
        return {f"made-up {name}": (parts, int(2 * shapes(name).elements * options.share) // 220)}
    found = {}
    for rate in options.lr or REAL_RATES:
        versions = real_steps(rate)
        parts = list(checkpoints(versions[1], versions[0]))
        found[f"real step of small, lr {rate:g}"] = (parts, 250_000)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--data", choices=("real", "made-up"), default="real")
    parser.add_argument("--lr", type=float, action="append", help="learning rate of a real run (default: three)")
    parser.add_argument("--shapes", choices=SHAPE_NAMES, help="made-up steps of these shapes")
    parser.add_argument("--share", type=float, default=1, help="share of the rows of each matrix")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--repeats", type=int, default=3, help="take the best time of this many runs")
    parser.add_argument("--published", action="store_true", help="also measure at published densities")
    parser.add_argument("--plot", type=png)
    options = parser.parse_args(arguments)
    if not compiled():
        print("compiling kernels, once", file=sys.stderr)
    try:
        rows = {}
        for title, (parts, expected) in _sources(options).items():
            found = measure(parts, expected, options.repeats)
            again = parts if isinstance(parts, list) else list(fabricate(SMALL, options.density))
            rows[title] = report(found, scaling(again))
            if not options.json:
                print(_table(title, rows[title]), end="\n\n")
        published = _published(options.repeats) if options.published else []
        if options.plot:
            _plot(options.plot, list(rows.values()), options.repeats)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        first = max(rows.values(), key=lambda row: -abs(row["density"] - 0.01))
        print(json.dumps({**first, "steps": rows, "published": published}))
    for row in () if options.json else published:
        published_ratio = f"published x{row['published_ratio']}" if row["published_ratio"] else "no ratio published"
        ours = f"{row['bits_per_change']:.2f} bits, x{row['ratio']:.0f}"
        print(f"{row['who']:<42}{100 * row['density']:>6.3g} %  {ours}; {published_ratio}")
    return 0 if all(row["exact"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
