"""`python -m scenarios.conformance`: makes the tables of docs/models.md.

python -m scenarios.conformance models [--families a,b] [--short] [--json FILE]
python -m scenarios.conformance models --engine vllm [--experts-in-place] [--json FILE]
python -m scenarios.conformance adapters

With vLLM, cells that FILE already contains are not run again.
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
    """Return the exit code: 1 when a cell is wrong."""
    parser = argparse.ArgumentParser(prog="scenarios.conformance", description=__doc__)
    parser.add_argument("which", choices=("models", "adapters"))
    parser.add_argument("--families", default="", help="model types, separated by commas (default: all)")
    parser.add_argument("--short", action="store_true", help="only the families that are commonly trained")
    parser.add_argument("--stored", default="", help="bf16,f16,f32,mixed (default: all)")
    parser.add_argument("--json", type=Path, help="also write every cell to this file")
    parser.add_argument("--names", default="", help="adapters, separated by semicolons (default: all)")
    parser.add_argument("--render", type=Path, help="print the table of a file that --json wrote")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers", help="for models")
    parser.add_argument(
        "--experts-in-place", action="store_true", help="vllm: use a kernel that does not repack experts"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    _quiet(options.threads)
    if options.which == "adapters":
        return _adapters(options)
    return _models_on_vllm(options) if options.engine == "vllm" else _models(options)


def _quiet(threads: int) -> None:
    import warnings

    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)


def _models(options: argparse.Namespace) -> int:
    from scenarios.conformance.families import SHORT, families
    from scenarios.conformance.models import STORED, Cell, run_cell

    if options.render:
        cells = [Cell(**cell) for cell in json.loads(options.render.read_text())]
        print(_model_table(cells))
        return 0
    chosen = options.families.split(",") if options.families else list(SHORT) if options.short else families()
    stored = options.stored.split(",") if options.stored else list(STORED)
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
            if options.json:
                options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
            took = time.monotonic() - started
            print(f"{family}: {len(cells)} cells after {took:.0f} s", file=sys.stderr, flush=True)
    print(_model_table(cells))
    return 1 if any(cell.outcome == "WRONG" for cell in cells) else 0


def _models_on_vllm(options: argparse.Namespace) -> int:
    """Run one cell of every family before the second of any. Each finished cell is written to the file at once."""
    from node.settings.logs import configure
    from scenarios.conformance.models import Cell
    from scenarios.conformance.on_vllm import EXPERTS, FAMILIES, ORDER, Host, run_cell
    from scenarios.engines.vllm_environment import vllm_python

    configure("warning")
    known = options.render or options.json
    cells = [Cell(**cell) for cell in json.loads(known.read_text())] if known and known.exists() else []
    if not options.render:
        chosen = options.families.split(",") if options.families else EXPERTS if options.experts_in_place else FAMILIES
        stored = options.stored.split(",") if options.stored else [each for each, _ in ORDER]
        done = {(cell.family, cell.stored, cell.tied) for cell in cells}
        wanted = [(family, each, tied) for each, tied in ORDER if each in stored for family in chosen]
        wanted = [cell for cell in wanted if cell not in done]
        with tempfile.TemporaryDirectory(prefix="swarm-") as top:
            folder = Path(top) / "cell"
            folder.mkdir()
            log = Path(tempfile.gettempdir()) / "swarm-conformance-vllm.log"
            host = Host(vllm_python(), log, experts_in_place=options.experts_in_place)
            try:
                for i, (family, each, tied) in enumerate(wanted):
                    started = time.monotonic()
                    cells.append(run_cell(host, family, each, tied=tied, folder=folder))
                    if options.json:
                        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
                    progress = f"{i + 1} of {len(wanted)}: {family} {each} {'tied' if tied else 'untied'}"
                    took = time.monotonic() - started
                    print(f"{progress}: {cells[-1].outcome} {cells[-1].why}, {took:.1f} s", file=sys.stderr, flush=True)
            finally:
                host.stop()
    print(_vllm_table(cells))
    return 1 if any(cell.outcome == "WRONG" for cell in cells) else 0


def _vllm_table(cells: list[Any]) -> str:
    """Format a row for each family that vLLM loads, and list the others with the reason."""
    families: dict[str, list[Any]] = {}
    for cell in sorted(cells, key=lambda cell: cell.family):
        families.setdefault(cell.family, []).append(cell)
    counts = Counter(cell.outcome for cell in cells)
    stored = ("bf16", "f16", "f32", "mixed")
    lines = [
        f"{sum(counts[word] for word in ('exact', 'refused', 'WRONG'))} cells were run, {counts['exact']} exact, "
        f"{counts['refused']} refused, {counts['WRONG']} wrong.",
        "",
        "| family | " + " | ".join(f"{each}{how}" for how in ("", " tied") for each in stored) + " | |",
        "|" + "---|" * (2 * len(stored) + 2),
    ]
    absent = []
    for family, found in families.items():
        whys = [cell.why.replace("|", "/") for cell in found if cell.outcome != "same" and cell.why]
        if all(cell.outcome in ("not built", "same") for cell in found):
            absent.append(f"- {family}: {whys[0][:160]}")
            continue
        words = [_vllm_word(found, each, tied) for tied in (False, True) for each in stored]
        lines.append(f"| {family} | {' | '.join(words)} | {_short(whys[0]) if whys else ''} |")
    return "\n".join([*lines, "", "No engine:", "", *absent])


def _short(why: str) -> str:
    """Remove the common beginnings of a reason."""
    return why.removeprefix("join: ").removeprefix("This vLLM cannot follow the swarm. ")[:170]


def _vllm_word(cells: list[Any], stored: str, tied: bool) -> str:
    """Return the outcome of a cell. An exact cell also says how many tensors are loaded by module, not in place."""
    cell = next((cell for cell in cells if (cell.stored, cell.tied) == (stored, tied)), None)
    if cell is None:
        return ""
    if cell.outcome == "exact" and cell.fused:
        return "exact, loaded" if cell.fused == cell.tensors else f"exact, {cell.fused} loaded"
    return "-" if cell.outcome == "same" else cell.outcome


def _model_table(cells: list[Any]) -> str:
    """Format a row for each family that was built, and list the others with the reason."""
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


def _adapters(options: argparse.Namespace) -> int:
    from scenarios.conformance.adapters import adapters, run_adapter

    cells = []
    for name in options.names.split(";") if options.names else adapters():
        cell = run_adapter(name)
        cells.append(cell)
        print(f"| {cell.name} | {cell.outcome} | {cell.why[:150]} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    counts = Counter(cell.outcome for cell in cells)
    print(f"\n{len(cells)} adapters: {dict(counts)}")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
