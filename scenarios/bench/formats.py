"""Measures steps in the formats of receivers: bytes against the bf16 delta, and updating against quantising anew.

    python -m scenarios.bench.formats                          a made-up step of 1 %, and random steps
    python -m scenarios.bench.formats --steps runs/lr1e-6      real steps: a folder of checkpoints v0000, v0001, ...
    python -m scenarios.bench.formats --check 1000             more random steps with every kind of bit pattern

Real steps come from the reference trainer, half an hour for 36 of them on two cores:

    python -m node.trainers.grpo --size small --lr 1e-6 --steps 36 --snapshots runs/lr1e-6

Each format is computed for every version in two ways: from the whole model, and from the version before and the
elements that changed. Both must have equal bits; the program ends with 1 if not. Its deltas are really coded. A holder
of a format receives the delta of the format, and that of the tensors that stay bf16.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.checkpoint import Checkpoint
from codec.chunk import CODER_PCO, CODER_RICE
from codec.errors import UsageError
from codec.formats.quantise import Band, quantise, requantise, warm_up
from codec.formats.spec import FORMATS, Format, FormatTensor, Matrix, format_ratio, is_quantised, quantised
from codec.layout import Layout, TensorSpec
from node.tools.format_sizes import FormatSizes, bands_of, coded_bytes, count_tensor, updated_bands
from node.tools.made_up import amplitude_of, made_up_step
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["main"]

_SIDE: Final = 4096
_EDGES: Final = np.array([0, 0x8000, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x3F80], np.uint16)
"""Bit patterns of zeros, denormals, the largest number, infinities, NaNs and one."""


@dataclass
class _Row:
    """One format over all steps of a run."""

    form: Format
    sizes: FormatSizes
    pco_bytes: int = 0
    full_s: float = 0.0
    update_s: float = 0.0
    steps: int = 0
    equal: bool = True
    bands: dict[str, list[Band]] = field(default_factory=dict)

    def take_step(self, spec: TensorSpec, old: Bits, new: Bits) -> None:
        """Count one tensor of one step."""
        tensor = FormatTensor(self.form, spec)
        before = self.bands.get(spec.name) or bands_of(tensor, old)
        began = time.thread_time()
        after = updated_bands(tensor, old, new, before)
        updated = time.thread_time()
        anew = bands_of(tensor, new)
        self.update_s += updated - began
        self.full_s += time.thread_time() - updated
        self.equal &= all(_same(one, other) for one, other in zip(after, anew, strict=True))
        count_tensor(self.sizes, tensor, before, after)
        pco = FormatSizes(self.form)
        count_tensor(pco, tensor, before, after, CODER_PCO)
        self.pco_bytes += pco.format_bytes
        self.bands[spec.name] = after

    def row(self, data: str, density: float) -> dict[str, Any]:
        sizes = self.sizes
        changes = sizes.changed_codes + sizes.changed_scales
        return {
            "data": data,
            "steps": self.steps,
            "density": density,
            "format": self.form.name,
            "of_bf16": sizes.of_bf16,
            "format_of_quantised": sizes.format_bytes / max(1, sizes.bf16_bytes - sizes.kept_bytes),
            "pco_of_chosen": self.pco_bytes / max(1, sizes.format_bytes),
            "changed_codes": sizes.changed_codes / max(1, sizes.codes),
            "changed_scales": sizes.changed_scales / max(1, sizes.scales),
            "bits_a_change": 8 * sizes.format_bytes / max(1, changes),
            "entropy": _entropy(sizes),
            "held": sizes.held,
            "full_s": self.full_s / max(1, self.steps),
            "update_s": self.update_s / max(1, self.steps),
            "equal": self.equal,
        }


def _entropy(sizes: FormatSizes) -> float:
    """Bits for each change: positions spread evenly, and a sign. (int4 also needs one for which half of a byte.)"""
    changes, total = sizes.changed_codes + sizes.changed_scales, sizes.codes + sizes.scales
    if not changes:
        return 0.0
    p = changes / total
    if p >= 1:
        return 1.0
    half = 1.0 if sizes.form.element == "int4" else 0.0
    return (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p + 1.0 + half


def _same(one: Band, other: Band) -> bool:
    return np.array_equal(one.codes, other.codes) and np.array_equal(one.scales, other.scales)


def _run(data: str, layout: Layout, versions: list[Any], forms: list[Format]) -> list[dict[str, Any]]:
    """Rows of consecutive versions. `versions`: functions from a tensor's name to its bits."""
    rows = [_Row(form, FormatSizes(form, held=format_ratio(layout, form))) for form in forms]
    changed = elements = 0
    for old_of, new_of in pairwise(versions):
        for spec in layout.tensors:
            old, new = old_of(spec.name), new_of(spec.name)
            elements += spec.elements
            changed += int(np.count_nonzero(old != new))
            nbytes = coded_bytes(old, new, spec.type, CODER_RICE)
            for row in rows:
                row.sizes.bf16_bytes += nbytes
                if is_quantised(spec, row.form):
                    row.take_step(spec, old, new)
                else:
                    row.sizes.kept_bytes += nbytes
        for row in rows:
            row.steps += 1
        print(f"{data}: step {rows[0].steps} of {len(versions) - 1}", file=sys.stderr)
    return [row.row(data, changed / max(1, elements)) for row in rows]


def _made_up(forms: list[Format], density: float) -> list[dict[str, Any]]:
    spec = TensorSpec("w.weight", "BF16", (_SIDE, _SIDE))
    old, new = made_up_step(_SIDE, _SIDE, amplitude_of(density), np.random.default_rng(0))
    return _run("made up", Layout((spec,)), [lambda name: old, lambda name: new], forms)


def _real(folder: Path, forms: list[Format]) -> list[dict[str, Any]]:
    opened = [Checkpoint.open(path) for path in sorted(folder.glob("v[0-9]*"))]
    if len(opened) < 2:
        raise UsageError(f"{folder} has no two checkpoints v0000, v0001, ...: see --help for how to make them.")
    layout = opened[0].layout
    quantised(layout, forms[0])
    return _run(f"real, {folder.name}", layout, [checkpoint.bits for checkpoint in opened], forms)


def _random_steps(forms: list[Format], steps: int) -> list[dict[str, Any]]:
    """Random steps of a small matrix, with every kind of bit pattern: whether updating never differs."""
    rows: list[dict[str, Any]] = []
    for form in forms:
        rng = np.random.default_rng(7)
        matrix = Matrix(1, 150, 300)
        bits: NDArray[np.uint16] = made_up_step(150, 300, 1e-5, rng)[0].astype(np.uint16)
        band, equal = quantise(bits, matrix, form), True
        for _ in range(steps):
            new = bits.copy()
            places = np.flatnonzero(rng.random(bits.size) < rng.choice([0.0005, 0.01, 0.2]))
            new[places] += rng.choice(np.array([1, 0xFFFF, 0x80, 0xFF80], np.uint16), places.size)
            odd = rng.random(places.size) < 0.02
            new[places[odd]] = rng.choice(_EDGES, int(odd.sum()))
            band = requantise(bits, new, np.flatnonzero(bits != new).astype(np.uint32), band, matrix, form)
            bits = new
            equal &= _same(band, quantise(bits, matrix, form))
        rows.append({"data": "random", "steps": steps, "format": form.name, "equal": equal})
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'data':<16}{'steps':>6}{'density':>9}  {'format':<18}{'received':>9}{'format':>8}{'codes':>9}{'scales':>9}"
        f"{'bits':>7}{'entropy':>9}{'pco':>6}{'held':>6}{'anew, s':>9}{'update, s':>10}  equal"
    )
    for row in rows:
        if row["data"] == "random":
            print(f"{row['data']:<16}{row['steps']:>6}{'':>9}  {row['format']:<18}{'':>82}  {row['equal']}")
            continue
        print(
            f"{row['data']:<16}{row['steps']:>6}{row['density']:>9.3%}  {row['format']:<18}{row['of_bf16']:>8.3f}x"
            f"{row['format_of_quantised']:>7.3f}x{row['changed_codes']:>9.4%}{row['changed_scales']:>9.3%}"
            f"{row['bits_a_change']:>7.1f}{row['entropy']:>9.1f}{row['pco_of_chosen']:>6.2f}{row['held']:>5.2f}x"
            f"{row['full_s']:>9.3f}{row['update_s']:>10.3f}  {row['equal']}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark on these arguments; 1 if updating gave other bits than quantising anew."""
    parser = json_parser(__doc__)
    parser.add_argument("--steps", type=Path, action="append", default=[], help="folder of consecutive checkpoints")
    parser.add_argument("--density", type=float, default=0.01, help="of the made-up step (default 0.01)")
    parser.add_argument("--check", type=int, default=100, help="random steps of each format (default 100)")
    parser.add_argument("--format", action="append", default=[], choices=sorted(FORMATS), help="default: all")
    options = parser.parse_args(arguments)
    forms = [FORMATS[name] for name in options.format or FORMATS]
    for form in forms:
        warm_up(form)
    rows = _made_up(forms, options.density)
    for folder in options.steps:
        rows += _real(folder, forms)
    rows += _random_steps(forms, options.check)
    if options.json:
        print(json.dumps({"scenario": "formats", "rows": rows}, indent=1))
    else:
        _print(rows)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    run_as_program(main)
