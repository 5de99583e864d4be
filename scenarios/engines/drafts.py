"""Measures whether a draft model that is updated with its target proposes as well as one that a fresh vLLM loads.

    python -m scenarios.engines.drafts [--json] [--case NAME]... [--updates 100]

Each case starts a vLLM for CPUs under a node's own driver, with a draft model that is a part of the replica.
`--updates` versions (1 % of the elements of both models) are committed, and every live bit of both is read back. Then
the acceptance length (`node.engines.vllm.speculation.Drafts`) and the greedy tokens are compared with those of a fresh
vLLM on the last version.

    draft-model    a small model of the same family: here a copy of the target with other low bits
    eagle          EAGLE's head on a Llama, without an embedding and an output head of its own

Exit code 1: in a case, the lengths differ by more than 2 %, or tokens or bits differ. The first run installs a vLLM for
CPUs into the user's cache. VLLM_PYTHON names another one.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from codec import Checkpoint, Replica, write_checkpoint
from codec.errors import SwarmError
from codec.parts import base_layout, draft_layout, draft_name
from node.engines.vllm.speculation import Drafts, drafts_of
from scenarios.engines.engine_bench import Bench, bench
from scenarios.engines.engine_models import make_eagle, make_llama, make_qwen3, step_of
from scenarios.engines.vllm_environment import vllm_python
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["CASES", "main", "measured", "models_of", "near", "run_case", "saved"]

CASES: Final = ("draft-model", "eagle")
PROMPTS: Final = [list(range(3 + i, 40 + i)) for i in range(8)]
TOKENS: Final = 64
WITHIN: Final = 0.02
"""By how much the two acceptance lengths may differ, as a share."""


def near(target: Path, folder: Path) -> Path:
    """Write a draft model that is like its target: half of its elements have another lowest bit."""
    checkpoint = Checkpoint.open(target)
    replica = Replica.from_checkpoint(checkpoint)
    replica.scatter(step_of(replica, 99, 0.5))
    write_checkpoint(folder, replica.layout, replica.bits, checkpoint.files)
    return folder


def models_of(case: str, home: Path) -> tuple[Path, Path]:
    """(the target's folder, the draft's folder) of a case."""
    if case == "eagle":
        return make_llama(home / "target"), make_eagle(home / "draft")
    target = make_qwen3(home / "target")
    return target, near(target, home / "draft")


def measured(live: Bench, prompts: int = len(PROMPTS), tokens: int = TOKENS) -> tuple[float, list[list[int]]]:
    """(acceptance length, greedy tokens of each prompt), one prompt at a time."""
    before = drafts_of(live.url)
    found = [ids for ids, _ in live.greedy(PROMPTS[:prompts], tokens)]
    after = drafts_of(live.url)
    return Drafts(after.steps - before.steps, after.accepted - before.accepted).acceptance or 0.0, found


def saved(live: Bench, draft: Path, folder: Path) -> tuple[Path, Path]:
    """Write checkpoints of target and draft at the present version. `draft`: the folder that the draft came from."""
    layout, bits = live.replica.layout, live.replica.bits
    own = draft_layout(layout)
    assert own is not None
    write_checkpoint(folder / "target", base_layout(layout), bits, live.checkpoint.files)
    write_checkpoint(folder / "draft", own, lambda name: bits(draft_name(name)), Checkpoint.open(draft).files)
    return folder / "target", folder / "draft"


def run_case(case: str, python: Path, updates: int) -> dict[str, Any]:
    """Run one case and return its row. Has `error`, a sentence, if vLLM cannot run it."""
    with tempfile.TemporaryDirectory(prefix="swarm-drafts-") as top:
        home = Path(top)
        target, draft = models_of(case, home)
        try:
            with bench(target, home / "live", python, threads=1, draft=draft) as live:
                first, _ = measured(live)
                pauses = [live.update(step_of(live.replica, number, 0.01)) for number in range(updates)]
                bits = bool((live.engine.live_hashes() == live.replica.hashes).all())
                in_place, tokens = measured(live)
                last = saved(live, draft, home / "last")
            with bench(last[0], home / "fresh", python, threads=1, draft=last[1]) as fresh:
                loaded, expected = measured(fresh)
        except SwarmError as error:
            return {"case": case, "error": str(error)}
    return {
        "case": case, "updates": updates, "acceptance_first": first, "acceptance_in_place": in_place,
        "acceptance_fresh": loaded, "bits_equal": bits, "tokens_equal": tokens == expected,
        "pause_ms": 1e3 * statistics.median(pauses) if pauses else None,
    }  # fmt: skip


def holds(row: dict[str, Any]) -> bool:
    """Whether a row is as it has to be."""
    if "error" in row or not (row["bits_equal"] and row["tokens_equal"]):
        return False
    return abs(row["acceptance_in_place"] / row["acceptance_fresh"] - 1) <= WITHIN


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="run only this case; may be repeated")
    parser.add_argument("--updates", type=int, default=100, help="versions (default 100)")
    given = parser.parse_args()
    python = vllm_python()
    rows = []
    for case in given.case or CASES:
        rows.append(run_case(case, python, given.updates))
        line = "  ".join(f"{name} {value}" for name, value in rows[-1].items())
        print(line, file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))
    return 0 if all(map(holds, rows)) else 1


if __name__ == "__main__":
    run_as_program(main)
