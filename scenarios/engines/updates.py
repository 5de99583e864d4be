"""Measures updates of a running vLLM, and checks that its weights are exact afterwards.

    python -m scenarios.engines.updates [--json] [--case NAME]... [--part exact|cost] [--updates 20] [--short]

Each case starts a vLLM under the driver that a node uses, and updates it by 1 % of the elements per version. The part
`exact` checks after every update that all live bits equal the replica's, and that greedy tokens and log-probabilities
equal those of a fresh engine on that checkpoint. The part `cost` measures the pause, the gaps between tokens and the
speed while staging, against a bare scatter, vLLM's own sparse loader and its full reload in the same process.

    tiny-untied, tiny-tied             a Qwen3 of 3.4 million parameters: exact
    tiny-tp2, tiny-tp2-untied          the same on two ranks
    qwen3-364m, qwen3-364m-tied        Qwen3's shape, 364 million parameters untied: exact, and cost
    smollm2                            real weights, 135 million (needs the smollm2 extra): exact, and cost
    latent                             DeepSeek's attention, which keeps the weights that it absorbs twice: exact
    experts, experts-mixtral           a Qwen3-MoE and a Mixtral, whose experts vLLM repacks on CPUs: exact
    experts-tp2                        the Qwen3-MoE on two ranks, with experts that its kernel pads: exact
    fp8                                weights quantized at load: exact, or refused
    experts-plain                      experts kept as triton keeps them on a GPU, by a kernel of our own (CPUs only)
    forms                              layers quantized, repacked and copied by kernels of our own (CPUs only): exact

The first run installs a vLLM for CPUs into the user's cache. VLLM_PYTHON names another, with or without a GPU.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from codec import write_checkpoint
from codec.errors import SwarmError
from node.engines.vllm.installed import installed
from node.engines.vllm.server import environment
from node.settings.logs import configure
from scenarios.engines import engine_fresh
from scenarios.engines.engine_bench import PROBE_ENV, SMALL, Bench, bench
from scenarios.engines.engine_cost import cost
from scenarios.engines.engine_models import make_experts, make_latent, make_qwen3, step_of
from scenarios.engines.vllm_environment import vllm_python
from scenarios.harness.command import json_parser

__all__ = ["main"]

PROMPTS: Final = [list(range(3 + i, 40 + i)) for i in range(3)]
TOKENS: Final = 16
PARTS: Final = ("exact", "cost")
SHORT: Final = ("forms",)
LARGE: Final = {"hidden": 1024, "layers": 25, "wide": 3072, "vocabulary": 33792}
"""364 million parameters untied."""
CASES: Final = (
    "tiny-untied", "tiny-tied", "tiny-tp2", "tiny-tp2-untied", "qwen3-364m", "qwen3-364m-tied", "smollm2", "latent",
    "experts", "experts-mixtral", "experts-tp2", "experts-plain", "fp8", "forms",
)  # fmt: skip
COSTED: Final = ("qwen3-364m", "qwen3-364m-tied", "smollm2")
PADDED: Final = 96
"""Rows of an expert's gate. A rank of two has 48, which vLLM's kernels for CPUs pad to 64."""
PROBE: Final = "swarm_probe.Probe"
KERNELS: Final = {"forms": "swarm_kernels.Kernels", "experts-plain": "swarm_experts.Experts"}


@dataclass(frozen=True)
class _Case:
    """One model to test. `flags`: additional flags of vLLM; `more`: the same as arguments of a fresh engine."""

    name: str
    folder: Path
    ranks: int
    flags: tuple[str, ...]
    more: dict[str, Any]


def _case(name: str, home: Path, cpu: bool) -> _Case:
    ranks = 2 if "tp2" in name else 1
    flags: tuple[str, ...] = ("--worker-extension-cls", PROBE)
    more: dict[str, Any] = {"enforce_eager": cpu}
    match name:
        case "smollm2":
            from node.trainers.grpo.smollm2 import smollm2_folder

            folder = smollm2_folder(_say)
        case "latent":
            folder = make_latent(home / "model")
        case "experts" | "experts-mixtral" | "experts-tp2" | "experts-plain":
            family = "mixtral" if name == "experts-mixtral" else "qwen3_moe"
            folder = make_experts(home / "model", family=family, narrow=PADDED if ranks > 1 else 128)
            more |= {} if cpu else {"moe_backend": "triton"}  # as our server's flags do
        case _:
            size: dict[str, Any] = dict(LARGE) if "364m" in name else {}
            tied = name in ("tiny-tied", "tiny-tp2", "qwen3-364m-tied")
            folder = make_qwen3(home / "model", tied=tied, **size)
    if name == "fp8":
        flags, more = (*flags, "--quantization", "fp8"), more | {"quantization": "fp8"}
    if name in KERNELS:
        flags, more = ("--worker-extension-cls", KERNELS[name]), more | {"worker_extension_cls": KERNELS[name]}
    return _Case(name, folder, ranks, flags, more)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_case(
    name: str, python: Path, updates: int, parts: Sequence[str] = PARTS, threads: int | None = None
) -> dict[str, Any]:
    """Run one case and return its row. `threads`: CPU threads of all ranks together; None: vLLM uses all cores."""
    with tempfile.TemporaryDirectory(prefix="swarm-engine-") as folder:
        home = Path(folder)
        started = time.perf_counter()
        case = _case(name, home, installed(python).cpu)
        row: dict[str, Any] = {"case": name}
        answers = None
        try:
            more = (*SMALL, *case.flags)
            running = bench(
                case.folder, home / "node", python, ranks=case.ranks, more=more, env=PROBE_ENV, threads=threads
            )
            with running as live:
                row["parameters"] = sum(t.elements for t in live.replica.layout.tensors)
                row["starts_s"] = round(time.perf_counter() - started, 1)
                row["loaded"] = dict(Counter(live.engine.classes.loaded.values()))
                if "exact" in parts:
                    answers = _follow(live, home, updates)
                if "cost" in parts and name in COSTED:
                    row |= cost(live, updates, home)
        except SwarmError as error:
            return {"case": name, "refused": str(error)}
        if answers is not None:
            row |= _compare(case, answers, home, python, threads)
        return row | {"seconds": round(time.perf_counter() - started)}


@dataclass(frozen=True)
class _Answers:
    """The engine after one update: whether all live bits equal the replica's, the pause, and its greedy answers."""

    bits_equal: bool
    pause_s: float
    answers: list[tuple[list[int], list[float]]]


def _follow(live: Bench, home: Path, updates: int) -> list[_Answers]:
    found = []
    for v in range(1, updates + 1):
        pause_s = live.update(step_of(live.replica, v))
        equal = bool((live.engine.live_hashes() == live.replica.hashes).all())
        write_checkpoint(home / f"v{v}", live.replica.layout, live.replica.bits, live.checkpoint.files)
        found.append(_Answers(equal, pause_s, live.greedy(PROMPTS, TOKENS)))
        _say(f"version {v}: live bits {'equal' if equal else 'DIFFER'}")
    return found


def _compare(case: _Case, ours: list[_Answers], home: Path, python: Path, threads: int | None) -> dict[str, Any]:
    """Compare the answers with those of fresh engines on the same checkpoints."""
    folders = [str(home / f"v{v}") for v in range(1, len(ours) + 1)]
    # on a GPU one process per checkpoint: its memory is only surely free when the process has ended
    groups = [folders] if installed(python).cpu else [[folder] for folder in folders]
    fresh = [answers for group in groups for answers in _ask_fresh(case, group, home, python, threads)]
    theirs = [[(ids, logprobs) for ids, logprobs in answers] for answers in fresh]
    pairs = [list(zip(mine.answers, them, strict=True)) for mine, them in zip(ours, theirs, strict=True)]
    return {
        "updates": len(ours),
        "exact_pause_ms": round(1e3 * statistics.median(after.pause_s for after in ours), 2),
        "bits_equal": sum(after.bits_equal for after in ours),
        "tokens_equal": sum(all(a[0] == b[0] for a, b in answers) for answers in pairs),
        "logprobs_equal": sum(all(a[1] == b[1] for a, b in answers) for answers in pairs),
    }


def _ask_fresh(case: _Case, folders: list[str], home: Path, python: Path, threads: int | None) -> list[Any]:
    """Return the answers of fresh engines, one per folder. Raises `RuntimeError` when an engine fails.

    They use as many threads as the engine under test: another order of summation gives other sums.
    """
    questions, log = home / "questions.json", home / "fresh.log"
    content = {"prompts": PROMPTS, "tokens": TOKENS, "folders": folders, "more": case.more}
    questions.write_text(json.dumps(content))
    fresh: list[Any] = []
    with log.open("wb") as errors:
        asking = subprocess.Popen(
            [python, engine_fresh.__file__, str(questions), str(case.ranks)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(os.environ, case.ranks, installed(python).cpu, threads) | PROBE_ENV,
        )
        with asking:
            for line in asking.stdout or ():
                if line.startswith("FRESH "):
                    fresh.append(json.loads(line[6:]))
                    _say(f"fresh engine on {Path(folders[len(fresh) - 1]).name}: asked")
    if len(fresh) != len(folders):
        raise RuntimeError(f"fresh engines failed: {log.read_text()[-2000:]}")
    return fresh


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 when a case that was not refused is not exact."""
    parser = json_parser(__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="run only this case; may be repeated")
    parser.add_argument("--part", action="append", choices=PARTS, help="run only this part of each case")
    parser.add_argument("--updates", type=int, default=20, help="versions per case (default 20)")
    parser.add_argument("--threads", type=int, help="CPU threads of all ranks together: 1 per rank on a busy host")
    parser.add_argument("--short", action="store_true", help="three updates of one case, for CI")
    given = parser.parse_args(arguments)
    configure(None if given.json else "warning")
    cases = given.case or (SHORT if given.short else CASES)
    updates = min(given.updates, 3) if given.short else given.updates
    python = vllm_python()
    rows = []
    for case in cases:
        rows.append(run_case(case, python, updates, given.part or PARTS, given.threads))
        line = "  ".join(f"{name} {value}" for name, value in rows[-1].items())
        print(line, file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps(rows, indent=2))
    return 0 if all(_exact(row) for row in rows) else 1


def _exact(row: dict[str, Any]) -> bool:
    if "refused" in row:
        return True
    wanted = row.get("updates", 0)
    compared = [row[name] == wanted for name in ("bits_equal", "tokens_equal", "logprobs_equal") if name in row]
    return all(compared) and row.get("cost_bits_equal", True)


if __name__ == "__main__":
    sys.exit(main())
