"""How many tokens of a cheating node are checked until it is quarantined, and how many honest nodes ever are.

Samples of honest nodes and of nodes that cheat are drawn and scored for real, on versions that
`python -m scenarios.verification.steps` made, or on any two checkpoints. What the product finds in them is drawn anew
for 1,000 lives of cheating nodes, for the tokens until 99 % are quarantined by the product's rules, and for 10^6 lives
of honest nodes. The samples are kept, so a second call takes only the time of the simulation.

    python -m scenarios.verification.power ~/steps                              # 1e-6, the newest version, bf16
    python -m scenarios.verification.power ~/steps --lr 1e-5 --version 12 --kinds honest stale
    python -m scenarios.verification.power ~/steps --author f32 --threads 2     # nodes of another class, of two threads
    python -m scenarios.verification.power ~/samples --checkpoints ~/run/step_16 ~/run/step_17
    python -m scenarios.verification.power ~/steps --samples 256 --plot power.png --json

The *checker* says how a sample was read: `replay`, token by token as it was drawn; `own`, in one pass in the author's
dtype; `other`, in one pass in the other dtype. The *number* is a kind of `node.verification.opinions`, or `at once`
where one sample convicts. 64 samples of each kind take about 15 minutes of one CPU core, and 4 GB of memory.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from node.status.progress import ProgressLine
from node.verification.assignment import PANEL, most_checked
from node.verification.opinions import Kind
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.plot import drawing, png
from scenarios.verification.numbers import ONE_PASS, Columns, mismatches, numbers, proven_at_once
from scenarios.verification.records import (
    DRAWN_BY_VLLM,
    KINDS_OF_SAMPLES,
    OTHER_CLASS,
    OWN_DTYPE,
    make_records,
    record_file,
)
from scenarios.verification.samples import load_record
from scenarios.verification.simulate import (
    Found,
    honest_lives,
    honest_replays,
    power_at_once,
    power_of_numbers,
    power_of_replays,
)
from scenarios.verification.sources import Source, from_checkpoints, from_steps
from scenarios.verification.steps import RATES

__all__ = ["ASKED", "Asked", "honest_rows", "measure"]

MOST_TOKENS: Final = 200_000
"""Checked tokens of a life. A node that is not found by then counts as not found."""
HONEST_SAMPLES: Final = 50_000
"""Samples in the life of an honest node."""
AT_ONCE: Final = "at once"

Floats = NDArray[np.float64]
RecordOf = Mapping[str, tuple[NDArray[np.int64], Columns]]
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
    Asked("all tokens, leased top-p .95", "top_p", 512, ("replay",), null="honest_top_p"),
    Asked("fp8", "fp8", 2_048, ("replay", "own", "other")),
    Asked("int8", "int8", 2_048, ("replay", "own", "other")),
    Asked("int4", "int4", 300, ("replay", "own", "other")),
    Asked("log-probabilities of another version", "claims", 300, ("replay", "own")),
    Asked("text of another node", "replayed", 300, ("replay", "own")),
)


def _suffix(checker: str, author: str) -> str:
    return {"replay": "replay", "own": OWN_DTYPE[author], "other": OTHER_CLASS[author]}[checker]


def _tried(
    asked: Asked, checker: str, records: RecordOf, author: str, settings: Mapping[str, Any]
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any], Found]]:
    """(name of the number, those of honest samples, those of attacked ones, what they find) for one checker."""
    if asked.null not in records or asked.attack not in records:
        return
    honest, attacked = records[asked.null], records[asked.attack]
    ends, suffix = attacked[0], _suffix(checker, author)
    tokens = float(ends[-1] / len(ends))
    ours = {name: value for name, value in settings.items() if name != "checkers"}
    if checker == "replay":
        before, after = mismatches(suffix, *honest), mismatches(suffix, *attacked)
        if before is not None and after is not None:
            yield str(Kind.UNLIKE), before, after, power_of_replays(before, after, tokens, **ours)
    before, after = proven_at_once(suffix, *honest), proven_at_once(suffix, *attacked)
    if before is not None and after is not None and after.any():
        limits = {name: value for name, value in ours.items() if name != "history"}
        yield AT_ONCE, before, after, power_at_once(after, tokens, **limits)
    for kind in ONE_PASS if checker != "replay" else ():
        first, second = numbers(kind, suffix, *honest), numbers(kind, suffix, *attacked)
        if first is not None and second is not None:
            yield str(kind), first, second, power_of_numbers(kind, first, second, tokens, **settings)


def measure(
    records: RecordOf,
    author: str,
    *,
    lives: int,
    history: int,
    checkers: int = PANEL,
    most_tokens: float = MOST_TOKENS,
    say: Any = lambda line: None,
) -> list[dict[str, Any]]:
    """One row for each attack, checker and number that the records allow."""
    rows = []
    settings = {"lives": lives, "history": history, "checkers": checkers, "most_tokens": most_tokens}
    for asked in ASKED:
        for checker in asked.checkers:
            say(f"{asked.label}: {checker}")
            for number, honest, attacked, found in _tried(asked, checker, records, author, settings):
                rows.append(
                    {
                        "attack": asked.label,
                        "asked": asked.tokens,
                        "checker": checker,
                        "number": number,
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
    rates: Sequence[float],
    *,
    lives: int,
    checks: int,
    history: int,
    checkers: int = PANEL,
    say: Any = lambda line: None,
) -> list[dict[str, Any]]:
    """How many of `lives` honest nodes are quarantined in `checks` checks, each of one sample. `tried`: (checker,
    number). `rates`: of mismatches, made up; honest samples that are alike in all bits leave nothing to simulate."""
    rows = []
    for checker, number in tried:
        row = {"checker": checker, "number": number, "lives": lives, "checks": checks}
        if number == Kind.UNLIKE:
            for rate in rates:
                say(f"honest lives: {rate:.0%} mismatches")
                found = honest_replays(rate, lives=lives, checks=checks, history=history)
                rows.append(row | {"rate": rate} | found._asdict())
        elif number != AT_ONCE:
            honest = numbers(Kind(number), _suffix(checker, author), *records["honest"])
            if honest is not None:
                say(f"honest lives: {number}, {checker}")
                found = honest_lives(
                    Kind(number), honest, lives=lives, checks=checks, history=history, checkers=checkers
                )
                rows.append(row | {"rate": None} | found._asdict())
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
    counts = (
        f"{result['run']}, version {result['version']}, {result['author']}; nulls from {result['history']:,} samples"
    )
    lines = [
        counts,
        f"{'attack':<38} {'asked':>7} {'measured':>9}  {'checker':<7} {'number':<11} honest, attack (mean)",
    ]
    for row in result["rows"] if result["all"] else best(result["rows"]):
        tokens = f"> {result['most_tokens']:,}" if row["tokens"] is None else f"{row['tokens']:,.0f}"
        lines.append(
            f"{row['attack']:<38} {row['asked']:>7,} {tokens:>9}  {row['checker']:<7} {row['number']:<11} "
            f"{row['honest'][0]:.3f}, {row['attacked'][0]:.3f}"
        )
    for row in result["honest"]:
        rate = "" if row["rate"] is None else f" of {row['rate']:.0%} mismatches"
        lines.append(
            f"honest, {row['lives']:,} lives of {row['checks']} checks{rate}: {row['accused']} quarantined "
            f"by {row['number']}, {row['checker']}; evidence of e^{row['most']:.1f} at most"
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
    parser.add_argument(
        "cache", type=Path, help="the folder with the steps; samples are kept in it, and a second call draws none again"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        nargs=2,
        metavar=("OLDER", "NEWER"),
        help="Hugging Face folders, in bf16, of the version before and of the one that honest nodes have; "
        "then the first argument may be any folder",
    )
    parser.add_argument("--lr", type=float, default=RATES[0], help="learning rate of the run (default 1e-6)")
    parser.add_argument("--version", type=int, help="the version that honest nodes have (default: the newest)")
    parser.add_argument("--size", default="smollm2", choices=("tiny", "small", "smollm2"), help="default smollm2")
    parser.add_argument(
        "--author",
        default="bf16",
        choices=tuple(OTHER_CLASS),
        help="dtype of nodes (default bf16); vllm: they draw with vLLM, and transformers reads in one pass",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads with which nodes draw (default 1)")
    parser.add_argument("--samples", type=int, default=64, help="honest samples; other kinds have half (default 64)")
    kinds = [kind.attack for kind in KINDS_OF_SAMPLES]
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=kinds,
        metavar="KIND",
        help=f"of {', '.join(kinds)} (default: all that can be drawn)",
    )
    parser.add_argument("--lives", type=int, default=1000, help="lives of cheating nodes (default 1000)")
    parser.add_argument("--most-tokens", type=int, default=MOST_TOKENS, help="checked of a life (default 200000)")
    parser.add_argument("--honest-lives", type=int, default=1_000_000, help="default 1000000; 0: none")
    checks = math.ceil(most_checked(HONEST_SAMPLES))
    parser.add_argument(
        "--honest-checks",
        type=int,
        default=checks,
        help=f"checks of an honest life (default {checks}: of {HONEST_SAMPLES:,} samples)",
    )
    parser.add_argument(
        "--honest-rates",
        type=float,
        nargs="*",
        default=(0.01, 0.1),
        help="mismatches of honest replays, made up (default 0.01 0.1)",
    )
    parser.add_argument("--history", type=int, default=2048, help="honest samples of other nodes (default 2048)")
    parser.add_argument("--checkers", type=int, default=PANEL, help=f"of a node, in turn (default {PANEL})")
    parser.add_argument("--all", action="store_true", help="all numbers and checkers, not only the best")
    parser.add_argument("--plot", type=png, metavar="FILE", help="draw power against tokens as a PNG")
    options = parser.parse_args(arguments)
    able = DRAWN_BY_VLLM if options.author == "vllm" else kinds
    options.kinds = options.kinds or able
    if odd := sorted({*options.kinds} - {*able}):
        parser.error(f"--kinds {' '.join(odd)}: not with --author {options.author}")
    if options.checkpoints is None:
        source = from_steps(options.cache, options.size, options.lr, options.version)
    else:
        source = from_checkpoints(*options.checkpoints)
    began = time.process_time()
    with ProgressLine("Reading the versions") as progress:

        def say(line: str) -> None:
            progress.label = line

        def file(attack: str) -> Path:
            return record_file(options.cache, source.name, source.version, options.author, options.threads, attack)

        _draw_missing(options, source, file, say)
        records = {kind: load_record(file(kind)) for kind in options.kinds}
        settings: dict[str, Any] = {"history": options.history, "checkers": options.checkers, "say": say}
        rows = measure(records, options.author, lives=options.lives, most_tokens=options.most_tokens, **settings)
        honest = []
        if options.honest_lives:
            tried = sorted({(row["checker"], row["number"]) for row in best(rows) if row["tokens"] is not None})
            counts = {"lives": options.honest_lives, "checks": options.honest_checks}
            honest = honest_rows(records, options.author, tried, options.honest_rates, **counts, **settings)
    result = {
        "scenario": "verification_power",
        "run": source.name,
        "version": source.version,
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


def _draw_missing(options: Any, source: Source, file: Any, say: Any) -> None:
    if all(file(kind).exists() for kind in options.kinds):
        return
    import torch

    torch.set_num_threads(1)
    versions, task = source.open()
    make_records(
        versions,
        task,
        file,
        source.version,
        options.author,
        options.samples,
        threads=options.threads,
        wanted=[kind for kind in KINDS_OF_SAMPLES if kind.attack in options.kinds],
        say=say,
    )


if __name__ == "__main__":
    run_as_program(main)
