"""Measures updates of a running SGLang, and checks that its weights are exact afterwards.

    python -m scenarios.engines.sglang_updates [--json] [--updates 20] [--share 0.01] [--tp 1] [--threads N]

An SGLang under the driver that a node uses, with a Qwen3 of 2 million random parameters, is updated by `--share` of the
elements per version. After every update all live bits are compared with the replica's. Then an SGLang without the
swarm's weight loader loads the last checkpoint itself, and greedy tokens and log-probabilities of both are compared.
The exit code is 1 if anything differs. The pause is the driver's: from the request to pause to the one to continue.

The first run installs an SGLang for CPUs into the user's cache. SGLANG_PYTHON names another, with or without a GPU.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from codec import write_checkpoint
from node.settings.logs import configure
from scenarios.engines.engine_bench import Bench
from scenarios.engines.engine_models import make_qwen3, step_of
from scenarios.engines.sglang_bench import bench, users_greedy, users_own
from scenarios.engines.sglang_environment import sglang_python
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["PROMPTS", "TOKENS", "compare", "follow", "main"]

PROMPTS: Final = [list(range(3 + i, 40 + i)) for i in range(3)]
"""No two begin with the same token, so none has a prefix in the cache."""
TOKENS: Final = 16


def follow(live: Bench, updates: int, share: float) -> dict[str, Any]:
    """Update the engine so many times. Returns after how many of them all live bits were the replica's, and the median
    and the longest pause in milliseconds."""
    equal, pauses = 0, []
    for _ in range(updates):
        pauses.append(1e3 * live.update(step_of(live.replica, live.version, share)))
        equal += bool((live.engine.live_hashes() == live.replica.hashes).all())
    longest, median = round(max(pauses), 1), round(statistics.median(pauses), 1)
    return {"updates": updates, "bits_equal": equal, "pause_ms": median, "longest_pause_ms": longest}


def compare(live: Bench, home: Path, python: Path, *, ranks: int = 1, threads: int | None = None) -> dict[str, int]:
    """In how many of `PROMPTS` greedy tokens and log-probabilities equal those of an SGLang of as many ranks and
    threads that loads the replica's checkpoint itself."""
    ours, folder = live.greedy(PROMPTS, TOKENS), home / "now"
    write_checkpoint(folder, live.replica.layout, live.replica.bits, live.checkpoint.files)
    with users_own(folder, home / "users.log", python, ranks=ranks, threads=threads) as url:
        pairs = list(zip(ours, users_greedy(url, PROMPTS, TOKENS), strict=True))
    return {f"{name}_equal": sum(a[i] == b[i] for a, b in pairs) for i, name in enumerate(("tokens", "logprobs"))}


def main() -> int:
    """Return the exit code."""
    parser = json_parser(__doc__)
    parser.add_argument("--updates", type=int, default=20, help="number of versions (default 20)")
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change (default 0.01)")
    parser.add_argument("--tp", type=int, default=1, help="number of tensor-parallel ranks (default 1)")
    parser.add_argument("--threads", type=int, help="CPU threads of all ranks together: 1 per rank on a busy host")
    given = parser.parse_args()
    configure(None if given.json else "warning")
    python = sglang_python()
    with tempfile.TemporaryDirectory(prefix="swarm-engine-") as folder:
        home = Path(folder)
        model = make_qwen3(home / "model", layers=2)
        with bench(model, home / "node", python, ranks=given.tp, threads=given.threads) as live:
            row = {"parameters": sum(tensor.elements for tensor in live.replica.layout.tensors)}
            row |= follow(live, given.updates, given.share)
            row |= compare(live, home, python, ranks=given.tp, threads=given.threads)
    print(json.dumps(row) if given.json else "  ".join(f"{name} {value}" for name, value in row.items()))
    exact = (row["bits_equal"], row["tokens_equal"], row["logprobs_equal"])
    return 0 if exact == (given.updates, len(PROMPTS), len(PROMPTS)) else 1


if __name__ == "__main__":
    run_as_program(main)
