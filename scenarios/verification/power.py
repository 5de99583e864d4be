"""How many tokens of a cheating node are checked until it is quarantined, and how many honest nodes ever are.

Samples of honest nodes and of nodes that cheat are drawn and scored for real, on versions that
`python -m scenarios.verification.steps` made. Their numbers (`scenarios.verification.numbers`) are resampled through
`node.verification.evidence`: 1,000 lives of cheating nodes for the tokens until 99 % are quarantined, and 10^6 lives of
honest nodes. The samples are kept beside the steps, so a second call takes only the time of the simulation.

    python -m scenarios.verification.power ~/steps                              # 1e-6, the newest version, bf16
    python -m scenarios.verification.power ~/steps --author f32 --lr 1e-5       # another class, other steps
    python -m scenarios.verification.power ~/steps --samples 256 --plot power.png --json

A *checker* column names how the sample was read: `replay`, token by token as it was drawn; `bf16` or `f32`, in one pass
in that dtype. 64 samples of each kind take about 15 minutes of one CPU core, and 4 GB of memory.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec.errors import UsageError
from node.status.progress import ProgressLine
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.plot import drawing, png
from scenarios.verification.lives import false_accusations, power
from scenarios.verification.numbers import NUMBERS, per_sample
from scenarios.verification.records import KINDS_OF_SAMPLES, OTHER_CLASS, make_records, record_file
from scenarios.verification.samples import load_record
from scenarios.verification.steps import RATES, kept_steps, run_folder

__all__ = ["ASKED", "Asked", "honest_rows", "measure"]

CHECKERS: Final = 5
"""Of a node, in turn. Two of them may lie."""
MOST_TOKENS: Final = 200_000
"""Checked tokens of a life. One that is not found by then counts as not found."""

Floats = NDArray[np.float64]
RecordOf = Mapping[str, tuple[NDArray[np.int64], Mapping[str, Floats]]]
"""(ends, columns) by kind of samples."""


class Asked(NamedTuple):
    """A row of the table: which attack, how many tokens it may take, and which checkers may be asked."""

    label: str
    attack: str
    tokens: int
    checkers: tuple[str, ...]
    null: str = "honest"


ASKED: Final = (
    Asked("one version older, same class", "stale", 4_096, ("replay",)),
    Asked("the same, kernels of another class", "stale", 32_768, ("own",)),
    Asked("the same, checker of another dtype", "stale", 32_768, ("other",)),
    Asked("best of two draws", "best_of_two", 512, ("replay", "own")),
    Asked("end of text suppressed", "no_end", 512, ("replay", "own")),
    Asked("temperature .9, leased 1", "temperature", 512, ("replay", "own")),
    Asked("all tokens, leased top-p .95", "top_p", 512, ("replay", "own"), null="honest_top_p"),
    Asked("fp8", "fp8", 2_048, ("replay", "own", "other")),
    Asked("int8", "int8", 2_048, ("replay", "own", "other")),
    Asked("int4", "int4", 300, ("replay", "own", "other")),
    Asked("log-probabilities of another version", "claims", 300, ("replay", "own")),
    Asked("text of another node", "replayed", 300, ("replay", "own")),
)


def _numbers(records: RecordOf, kind: str, name: str, checker: str) -> Floats | None:
    found = per_sample(name, checker, *records[kind]) if kind in records else None
    if found is None:
        return None
    found = found[np.isfinite(found)]
    return found if len(found) else None


def _suffix(checker: str, author: str) -> str:
    return {"replay": "replay", "own": author, "other": OTHER_CLASS[author]}[checker]


def measure(
    records: RecordOf,
    author: str,
    *,
    lives: int,
    history: int,
    checkers: int,
    most_tokens: float = MOST_TOKENS,
    names: Sequence[str] = tuple(NUMBERS),
    say: Any = lambda line: None,
) -> list[dict[str, Any]]:
    """One row for each attack, checker and number that the records allow."""
    rows = []
    for asked in ASKED:
        for checker in asked.checkers:
            for name in names:
                suffix = _suffix(checker, author)
                honest = _numbers(records, asked.null, name, suffix)
                attacked = _numbers(records, asked.attack, name, suffix)
                if honest is None or attacked is None:
                    continue
                say(f"{asked.label}: {name}, {checker}")
                ends = records[asked.attack][0]
                found = power(
                    honest,
                    attacked,
                    float(ends[-1] / len(ends)),
                    NUMBERS[name].reach,
                    most_tokens=most_tokens,
                    lives=lives,
                    history=history,
                    checkers=checkers,
                )
                rows.append(
                    {
                        "attack": asked.label,
                        "asked": asked.tokens,
                        "checker": checker,
                        "number": name,
                        "honest": [float(honest.mean()), float(honest.std())],
                        "attacked": [float(attacked.mean()), float(attacked.std())],
                        "samples": [len(honest), len(attacked)],
                        "tokens": found.tokens,
                        "curve": found.curve,
                    }
                )
    return rows


def honest_rows(
    records: RecordOf,
    author: str,
    tried: Sequence[tuple[str, str]],
    *,
    lives: int,
    checks: int,
    history: int,
    checkers: int,
    say: Any = lambda line: None,
) -> list[dict[str, Any]]:
    """How many of `lives` honest nodes are quarantined in `checks` checks. `tried`: (checker, number)."""
    rows = []
    for checker, name in tried:
        honest = _numbers(records, "honest", name, _suffix(checker, author))
        if honest is None:
            continue
        say(f"honest lives: {name}, {checker}")
        accused, most = false_accusations(
            honest,
            NUMBERS[name].reach,
            lives=lives,
            checks=checks,
            history=history,
            checkers=checkers,
        )
        row = {"checker": checker, "number": name, "lives": lives, "checks": checks}
        rows.append(row | {"accused": accused, "most": most})
    return rows


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each attack the row that finds it soonest; where none does, the last one."""
    by_attack: dict[str, dict[str, Any]] = {}
    for row in rows:
        held = by_attack.get(row["attack"])
        if held is None or (row["tokens"] or np.inf) <= (held["tokens"] or np.inf):
            by_attack[row["attack"]] = row
    return list(by_attack.values())


def _table(result: dict[str, Any]) -> str:
    lines = [f"{'attack':<38} {'asked':>7} {'measured':>9}  {'checker':<7} {'number':<11} honest, attack (mean)"]
    for row in result["rows"] if result["all"] else best(result["rows"]):
        tokens = f"> {result['most_tokens']:,}" if row["tokens"] is None else f"{row['tokens']:,.0f}"
        lines.append(
            f"{row['attack']:<38} {row['asked']:>7,} {tokens:>9}  {row['checker']:<7} {row['number']:<11} "
            f"{row['honest'][0]:.3f}, {row['attacked'][0]:.3f}"
        )
    for row in result["honest"]:
        lines.append(
            f"honest, {row['lives']:,} lives of {row['checks']} checks: {row['accused']} quarantined "
            f"by {row['number']}, {row['checker']}; largest evidence e^{row['most']:.1f}"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """The share of cheating nodes that are quarantined against the tokens that were checked, a line an attack."""
    with drawing(path, inches=(8.5, 6.0)) as axes:
        for i, row in enumerate(best(result["rows"])):
            tokens, shares = zip(*row["curve"], strict=True)
            label = f"{row['attack']} ({row['number']}, {row['checker']})"
            axes.step(
                np.maximum(tokens, 1.0), shares, where="post", label=label, linestyle=("-", "--", ":")[i // 5 % 3]
            )
        axes.set(xscale="log", xlim=(30, result["most_tokens"]), ylim=(0, 1.02))
        axes.set(xlabel="checked tokens of the node", ylabel="share of cheating nodes in quarantine")
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
        axes.grid(alpha=0.3)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("cache", type=Path, help="the folder with the steps; samples are kept in it")
    parser.add_argument("--lr", type=float, default=RATES[0], help="learning rate of the run (default 1e-6)")
    parser.add_argument("--version", type=int, help="the version that honest nodes have (default: the newest)")
    parser.add_argument("--size", default="smollm2", choices=("tiny", "small", "smollm2"), help="default smollm2")
    parser.add_argument("--author", default="bf16", choices=tuple(OTHER_CLASS), help="dtype of nodes (default bf16)")
    parser.add_argument("--threads", type=int, default=1, help="threads with which nodes draw (default 1)")
    parser.add_argument("--samples", type=int, default=64, help="honest samples; other kinds have half (default 64)")
    kinds = [kind.attack for kind in KINDS_OF_SAMPLES]
    parser.add_argument(
        "--kinds", nargs="+", default=kinds, choices=kinds, metavar="KIND", help=f"of {', '.join(kinds)}"
    )
    parser.add_argument("--lives", type=int, default=1000, help="lives of cheating nodes (default 1000)")
    parser.add_argument("--most-tokens", type=int, default=MOST_TOKENS, help="checked of a life (default 200000)")
    parser.add_argument("--honest-lives", type=int, default=1_000_000, help="default 1000000; 0: none")
    parser.add_argument("--honest-checks", type=int, default=200, help="checks of an honest life (default 200)")
    parser.add_argument("--history", type=int, default=2048, help="honest numbers of a null (default 2048)")
    parser.add_argument("--checkers", type=int, default=CHECKERS, help="of a node, in turn (default 5)")
    parser.add_argument("--all", action="store_true", help="all numbers and checkers, not only the best")
    parser.add_argument("--plot", type=png, metavar="FILE", help="draw power against tokens as a PNG")
    options = parser.parse_args(arguments)
    run = run_folder(options.cache, options.size, options.lr)
    newest = kept_steps(run)
    version = newest if options.version is None else options.version
    if not 1 <= version <= newest:
        raise UsageError(
            f"{run} has {newest} steps: run `python -m scenarios.verification.steps {options.cache}` first."
        )
    began = time.process_time()
    with ProgressLine("Reading the versions") as progress:

        def say(line: str) -> None:
            progress.label = line

        def file(attack: str) -> Path:
            return record_file(options.cache, options.lr, version, options.author, attack)

        _draw_missing(options, run, version, file, say)
        records = {kind: load_record(file(kind)) for kind in options.kinds}
        settings: dict[str, Any] = {"history": options.history, "checkers": options.checkers}
        settings |= {"say": say}
        rows = measure(records, options.author, lives=options.lives, most_tokens=options.most_tokens, **settings)
        honest = []
        if options.honest_lives:
            tried = sorted({(row["checker"], row["number"]) for row in best(rows) if row["tokens"] is not None})
            counts = {"lives": options.honest_lives, "checks": options.honest_checks}
            honest = honest_rows(records, options.author, tried, **counts, **settings)
    result = {
        "scenario": "verification_power",
        "run": run.name,
        "version": version,
        "author": options.author,
        "checkers": options.checkers,
        "history": options.history,
        "most_tokens": options.most_tokens,
        "rows": rows,
        "honest": honest,
        "cpu_s": time.process_time() - began,
        "all": options.all,
    }
    if options.plot is not None:
        draw(result, options.plot)
    print(json.dumps(result) if options.json else _table(result))
    return 1 if any(row["accused"] for row in honest) else 0


def _draw_missing(options: Any, run: Path, version: int, file: Any, say: Any) -> None:
    if all(file(kind).exists() for kind in options.kinds):
        return
    import torch

    from node.trainers.grpo import SIZES
    from scenarios.verification.models import Versions
    from scenarios.verification.task import Sentences

    torch.set_num_threads(1)
    size = SIZES[options.size]
    base = size.folder(lambda line: print(line, file=sys.stderr, flush=True))
    task = Sentences.of(base) if options.size == "smollm2" else size.task(base)
    make_records(
        Versions(base, run),
        task,
        file,
        version,
        options.author,
        options.samples,
        threads=options.threads,
        wanted=[kind for kind in KINDS_OF_SAMPLES if kind.attack in options.kinds],
        say=say,
    )


if __name__ == "__main__":
    run_as_program(main)
