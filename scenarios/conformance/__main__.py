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


def main() -> int:
    """Exit code 1 when anything is wrong, or an error is none of ours."""
    parser = argparse.ArgumentParser(prog="scenarios.conformance", description=__doc__)
    parser.add_argument("which", choices=("models", "adapters"))
    parser.add_argument("--families", default="", help="model types, by commas (default: all)")
    parser.add_argument("--short", action="store_true", help="the families that people train")
    parser.add_argument("--stored", default="", help="bf16,f16,f32,mixed (default: all)")
    parser.add_argument("--json", type=Path, help="also write every cell to this file")
    parser.add_argument("--names", default="", help="adapters, by semicolons (default: all)")
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
    from scenarios.conformance.models import STORED, run_cell

    chosen = asked.families.split(",") if asked.families else list(SHORT) if asked.short else families()
    stored = asked.stored.split(",") if asked.stored else list(STORED)
    cells = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "cell"
        folder.mkdir()
        for family in chosen:
            found = []
            for each in stored:
                for tied in (False, True):
                    found.append(run_cell(family, each, tied=tied, folder=folder))
            cells += found
            print(_model_row(family, found), flush=True)
    counts = Counter(cell.outcome for cell in cells)
    print(f"\n{len(cells)} cells of {len(chosen)} families in {time.monotonic() - started:.0f} s: {dict(counts)}")
    if asked.json:
        asked.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    return 1 if counts["WRONG"] else 0


def _model_row(family: str, cells: list) -> str:
    words = [f"{cell.outcome}" if cell.outcome != "same" else "-" for cell in cells]
    fused = max(cell.fused for cell in cells)
    total = max(cell.tensors for cell in cells)
    whys = sorted({f"{cell.outcome}: {cell.why}" for cell in cells if cell.why and cell.outcome != "same"})
    untied, tied = ("/".join(words[i::2]) for i in (0, 1))
    short = {"/".join([word] * (len(words) // 2)): word for word in words}
    return (
        f"| {family} | {short.get(untied, untied)} | {short.get(tied, tied)} | {fused} of {total} | "
        f"{'; '.join(whys)[:400]} |"
    )


def _adapters(asked: argparse.Namespace) -> int:
    from scenarios.conformance.adapters import adapters, run_adapter

    cells = []
    for name in asked.names.split(";") if asked.names else adapters():
        cell = run_adapter(name)
        cells.append(cell)
        print(f"| {cell.name} | {cell.outcome} | {cell.why} |", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    counts = Counter(cell.outcome for cell in cells)
    print(f"\n{len(cells)} adapters: {dict(counts)}")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
