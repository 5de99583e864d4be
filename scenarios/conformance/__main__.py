"""`python -m scenarios.conformance`: the tables that docs/models.md shows.

python -m scenarios.conformance models [--families a,b] [--short] [--json FILE]
python -m scenarios.conformance adapters
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main() -> int:
    """Exit code 1 when anything is wrong, or an error is none of ours."""
    parser = argparse.ArgumentParser(prog="scenarios.conformance", description=__doc__)
    parser.add_argument("which", choices=("models", "adapters"))
    parser.add_argument("--families", default="", help="model types, by commas (default: all)")
    parser.add_argument("--short", action="store_true", help="the families that people train")
    parser.add_argument("--stored", default="", help="bf16,f16,f32,mixed (default: all)")
    parser.add_argument("--json", type=Path, help="also write every cell to this file")
    parser.add_argument("--names", default="", help="adapters, by semicolons (default: all)")
    parser.add_argument("--render", type=Path, help="print the table of a file that --json wrote")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    _quiet(asked.threads)
    return _models(asked) if asked.which == "models" else _adapters(asked)


def _quiet(threads: int) -> None:
    import warnings

    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)


def _models(asked: argparse.Namespace) -> int:
    from scenarios.conformance.families import SHORT, families
    from scenarios.conformance.models import STORED, Cell, run_cell

    if asked.render:
        cells = [Cell(**cell) for cell in json.loads(asked.render.read_text())]
        print(_model_table(cells))
        return 0
    chosen = asked.families.split(",") if asked.families else list(SHORT) if asked.short else families()
    stored = asked.stored.split(",") if asked.stored else list(STORED)
    cells = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "cell"
        folder.mkdir()
        for family in chosen:
            for each in stored:
                for tied in (False, True):
                    cells.append(run_cell(family, each, tied=tied, folder=folder))
                    if cells[-1].outcome == "WRONG":
                        print(cells[-1], file=sys.stderr, flush=True)
            if asked.json:
                asked.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
            took = time.monotonic() - started
            print(f"{family}: {len(cells)} cells after {took:.0f} s", file=sys.stderr, flush=True)
    print(_model_table(cells))
    return 1 if any(cell.outcome == "WRONG" for cell in cells) else 0


def _model_table(cells: list[Any]) -> str:
    """A row for each family that was built, and what was not, with the reason."""
    families: dict[str, list[Any]] = {}
    for cell in cells:
        families.setdefault(cell.family, []).append(cell)
    counts = Counter(cell.outcome for cell in cells)
    stored = list(dict.fromkeys(cell.stored for cell in cells))
    lines = [
        f"{sum(counts[word] for word in ('exact', 'bits', 'refused', 'WRONG'))} cells were run, "
        f"{counts['exact']} exact, {counts['bits']} exact in bits, {counts['refused']} refused, "
        f"{counts['WRONG']} wrong.",
        "",
        f"| family | untied: {', '.join(stored)} | tied: the same | tensors, fused of all | |",
        "|---|---|---|---|---|",
    ]
    absent = []
    for family, found in families.items():
        if all(cell.outcome in ("not built", "same") for cell in found):
            absent.append(f"- {family}: {next(cell.why for cell in found if cell.outcome == 'not built')[:110]}")
            continue
        lines.append(_model_row(family, found))
    return "\n".join([*lines, "", "Not built:", "", *absent])


def _model_row(family: str, cells: list[Any]) -> str:
    def outcomes(tied: bool) -> str:
        words = ["-" if cell.outcome == "same" else cell.outcome for cell in cells if cell.tied == tied]
        return words[0] if len(set(words)) == 1 else ", ".join(words)

    ran = [cell for cell in cells if cell.tensors]
    fused, tensors = max((cell.fused, cell.tensors) for cell in ran) if ran else (0, 0)
    whys = sorted({cell.why for cell in cells if cell.why and cell.outcome != "same"})
    note = whys[0].replace("|", "/")[:150] if whys else ""
    return f"| {family} | {outcomes(False)} | {outcomes(True)} | {f'{fused} of ' if fused else ''}{tensors} | {note} |"


def _adapters(asked: argparse.Namespace) -> int:
    from scenarios.conformance.adapters import adapters, run_adapter

    cells = []
    for name in asked.names.split(";") if asked.names else adapters():
        cell = run_adapter(name)
        cells.append(cell)
        print(f"| {cell.name} | {cell.outcome} | {cell.why[:150]} |", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    counts = Counter(cell.outcome for cell in cells)
    print(f"\n{len(cells)} adapters: {dict(counts)}")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
