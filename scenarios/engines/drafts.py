"""Asks what a vLLM for CPUs can do with draft models, and whether a draft can be updated in place with its target.

    python -m scenarios.engines.drafts [--json] [--case NAME]... [--updates 100]

Each case starts one vLLM with a speculative decoder, in its own Python. Where the decoder has weights, `--updates`
versions of target and draft (1 % of the elements of both) are written into both models by the plugin's own code, and
the acceptance length is compared with that of a fresh vLLM on the last version. The acceptance length is the mean
number of tokens that a step of the target gives.

    ngram          proposes what followed the same tokens before: no weights
    draft-model    a small model of the same family: here a copy of the target with other low bits
    eagle          EAGLE's head on a Llama, with weights of its own and the target's embedding and head

The first run installs a vLLM for CPUs into the user's cache. VLLM_PYTHON names another one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from codec import Checkpoint, Replica, write_checkpoint, write_patch
from node.engines.vllm.installed import installed
from node.engines.vllm.server import environment
from scenarios.engines import drafts_host
from scenarios.engines.engine_bench import PROBE_ENV
from scenarios.engines.engine_models import make_eagle, make_llama, make_qwen3, step_of
from scenarios.engines.vllm_environment import vllm_python
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["CASES", "main", "run_case"]

CASES: Final = ("ngram", "draft-model", "eagle")
PROPOSED: Final = 3
"""Tokens that are proposed at a time."""
PROMPTS: Final = [list(range(3 + i, 40 + i)) for i in range(8)]
TOKENS: Final = 64
WITHIN_S: Final = 1800.0


def _case(name: str, home: Path) -> tuple[Path, Path | None, dict[str, Any]]:
    """(target's folder, draft's folder, vLLM's `speculative_config` without the draft's folder)."""
    if name == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": PROPOSED, "prompt_lookup_max": PROPOSED}
        return make_qwen3(home / "target"), None, config
    if name == "eagle":
        target = make_llama(home / "target")
        return target, make_eagle(home / "draft"), {"method": "eagle", "num_speculative_tokens": PROPOSED}
    target = make_qwen3(home / "target")
    draft = _stepped(Replica.from_checkpoint(Checkpoint.open(target)), Checkpoint.open(target), home / "draft")
    return target, draft, {"method": "draft_model", "num_speculative_tokens": PROPOSED}


def _stepped(replica: Replica, checkpoint: Checkpoint, folder: Path) -> Path:
    """A model near the replica's: half of its elements have another lowest bit."""
    replica.scatter(step_of(replica, 99, 0.5))
    write_checkpoint(folder, replica.layout, replica.bits, checkpoint.files)
    return folder


def _versions(folder: Path, home: Path, updates: int) -> tuple[list[str], Path]:
    """(a file with the weight patch of each version of this model, the folder of the last version)."""
    checkpoint = Checkpoint.open(folder)
    replica = Replica.from_checkpoint(checkpoint)
    patches = []
    for number in range(updates):
        staged = step_of(replica, number)
        fd, _ = write_patch(staged, replica.layout)
        replica.scatter(staged)
        path = home / f"{folder.name}-{number}.patch"
        with os.fdopen(fd, "rb") as file, path.open("wb") as out:
            file.seek(0)
            shutil.copyfileobj(file, out)
        patches.append(str(path))
    last = home / f"{folder.name}-last"
    write_checkpoint(last, replica.layout, replica.bits, checkpoint.files)
    return patches, last


def run_case(name: str, python: Path, updates: int) -> dict[str, Any]:
    """Run one case and return its row. Has `error`, vLLM's own words, if vLLM cannot run it."""
    with tempfile.TemporaryDirectory(prefix="swarm-drafts-") as top:
        home = Path(top)
        target, draft, config = _case(name, home)
        row: dict[str, Any] = {"case": name}
        if draft is None:
            found = _ask(python, home, target, None, config, [])
            found.pop("tokens", None)
            return row | found
        models = [(folder, *_versions(folder, home, updates)) for folder in (target, draft)]
        patches = [list(pair) for pair in zip(models[0][1], models[1][1], strict=True)]
        found = _ask(python, home, target, draft, config, patches)
        if "error" in found:
            return row | found
        fresh = _ask(python, home, models[0][2], models[1][2], config, [])
        return row | {
            "acceptance_first": found["acceptance"],
            "acceptance_in_place": found["acceptance_after"],
            "acceptance_fresh": fresh.get("acceptance"),
            "tokens_equal": found["tokens_after"] == fresh.get("tokens"),
            "opaque": found["opaque"],
            "shared": found["shared"],
            "pause_ms": found["pause_ms"],
        }


def _ask(
    python: Path, home: Path, target: Path, draft: Path | None, config: dict[str, Any], patches: list[list[str]]
) -> dict[str, Any]:
    questions = home / "questions.json"
    speculative = config if draft is None else config | {"model": str(draft)}
    content = {"folder": str(target), "speculative": speculative, "patches": patches}
    content |= {"prompts": PROMPTS, "tokens": TOKENS}
    questions.write_text(json.dumps(content))
    done = subprocess.run(
        [python, drafts_host.__file__, str(questions)], capture_output=True, text=True, timeout=WITHIN_S, check=False,
        env=environment(os.environ, 1, installed(python).cpu, 1) | PROBE_ENV,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(drafts_host.MARK)]
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"error": errors[-1].strip()[:400] if errors else f"exit code {done.returncode}"}
    return json.loads(lines[-1].removeprefix(drafts_host.MARK))


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
    return 0


if __name__ == "__main__":
    run_as_program(main)
