"""Measures the share of weights that changes, against learning rate and steps between publishes, and predicts it.

    python -m scenarios.bench.sparsity [--json] [--plot sparsity.png]

A bf16 element changes when its fp32 master crosses a rounding boundary. With masters spread evenly within their cells,
an update of size d makes a weight w cross with probability min(1, |d| / ulp(w)). Adam's updates are about the learning
rate times a constant. Over k steps with momentum 0.9 they add up to g(k) times one step's update, where

    g(k)^2 = k + 2 sum over j < k of (k - j) 0.9^j

So density(lr, k) = mean over the weights of E min(1, c lr g(k) |n| / ulp(w)), n normal. The constant c is fitted once,
to one step at learning rate 1e-6; every other point of the curve is a prediction.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError
from codec.staging import encode
from scenarios.bench.codec_data import BACK, REAL_RATES, Part, checkpoints, real_steps
from scenarios.harness.command import json_parser
from scenarios.harness.plot import drawing, png

__all__ = ["main", "spread"]

_FITTED_RATE = 1e-6
_MOMENTUM = 0.9


def spread(steps: int, momentum: float = _MOMENTUM) -> float:
    """Return g(k), the standard deviation of the sum of k AR(1) updates over that of one."""
    together = sum((steps - j) * momentum**j for j in range(1, steps))
    return (steps + 2 * together) ** 0.5


def _units(parts: list[Part]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (ulp, share of elements) by exponent, over all bf16 parts."""
    counts = np.zeros(256)
    for part in parts:
        counts += np.bincount((part.old >> np.uint16(7)) & np.uint16(0xFF), minlength=256)
    exponents = np.flatnonzero(counts)
    return 2.0 ** (np.maximum(exponents, 1) - 127.0 - 7), counts[exponents] / counts.sum()


def _theory(units: NDArray[np.float64], shares: NDArray[np.float64], size: float) -> float:
    """Return the mean over weights and normal n of min(1, size |n| / ulp)."""
    n = (np.arange(2000) + 0.5) / 250  # |n| up to 8
    weight = np.exp(-(n**2) / 2)
    weight /= weight.sum()
    crossed = np.minimum(1, size * n[None, :] / units[:, None]) @ weight
    return float(crossed @ shares)


def _fit(units: NDArray[np.float64], shares: NDArray[np.float64], density: float) -> float:
    """Return the update size at which theory gives this density."""
    low, high = 1e-12, 1.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _theory(units, shares, middle) < density else (low, middle)
    return high


def _measure(old: Path, new: Path) -> dict[str, Any]:
    """Return density, payload, bits per change and ratio of one delta."""
    elements = changed = coded = full = 0
    for part in checkpoints(old, new):
        for start in range(0, part.old.size, 1 << 20):
            before, after = part.old[start : start + (1 << 20)], part.new[start : start + (1 << 20)]
            delta = encode(0, before, after, part.dtype)
            coded += len(delta.payload) if delta else 0
            changed += int(np.count_nonzero(before != after))
        elements += part.old.size
        full += part.old.nbytes
    return {
        "density": changed / elements,
        "payload_bytes": coded,
        "bits_per_change": 8 * coded / max(changed, 1),
        "ratio": full / max(coded, 1),
    }


def _rows(rates: list[float]) -> list[dict[str, Any]]:
    runs = {rate: real_steps(rate) for rate in sorted({_FITTED_RATE, *rates})}
    parts = list(checkpoints(runs[_FITTED_RATE][1], runs[_FITTED_RATE][0]))
    units, shares = _units([part for part in parts if part.dtype.name == "BF16"])
    rows = [
        {"lr": rate, "steps": back, **_measure(versions[back], versions[0])}
        for rate, versions in runs.items()
        for back in BACK
        if back
    ]
    one = next(row["density"] for row in rows if (row["lr"], row["steps"]) == (_FITTED_RATE, 1))
    size = _fit(units, shares, one)
    for row in rows:
        row["theory"] = _theory(units, shares, size * row["lr"] / _FITTED_RATE * spread(row["steps"]))
        first = next(other for other in rows if (other["lr"], other["steps"]) == (row["lr"], 1))
        row["of_single_steps"] = row["payload_bytes"] / (row["steps"] * first["payload_bytes"])
    return rows


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Plot density against steps, one colour per learning rate."""
    with drawing(path, inches=(7, 4.5)) as axes:
        for rate in sorted({row["lr"] for row in rows}):
            mine = [row for row in rows if row["lr"] == rate]
            (line,) = axes.plot(
                [row["steps"] for row in mine], [100 * row["density"] for row in mine], "o", label=f"lr {rate:g}"
            )
            axes.plot(
                [row["steps"] for row in mine], [100 * row["theory"] for row in mine], "--", color=line.get_color()
            )
        axes.set(
            xscale="log", yscale="log", xlabel="steps between publishes", ylabel="changed elements, % (dashed: theory)"
        )
        axes.legend()


def main(arguments: list[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--lr", type=float, action="append", help="learning rate of a run (default: three)")
    parser.add_argument("--plot", type=png)
    options = parser.parse_args(arguments)
    try:
        rows = _rows(options.lr or list(REAL_RATES))
        if options.plot:
            _plot(options.plot, rows)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{'lr':>7}{'steps':>7}{'density':>10}{'theory':>10}{'bits/change':>13}{'ratio':>8}{'of single steps':>17}")
    for row in rows:
        print(
            f"{row['lr']:>7.0e}{row['steps']:>7}{100 * row['density']:>9.3f}%{100 * row['theory']:>9.3f}%"
            f"{row['bits_per_change']:>13.2f}{row['ratio']:>8.0f}{row['of_single_steps']:>17.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
