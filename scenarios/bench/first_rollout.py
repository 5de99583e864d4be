"""Measures how long a machine takes from one pasted line to its first accepted rollout, phase by phase.

A seed, its gateway and a client that waits with a prompt run already; the image and the model are on the machine. Then
`swarm-node join TICKET --model FOLDER` starts in an empty home. The phases end with lines of its log, and the last one
with the client's answer, which the ledger has accepted by then. That the engine generates is read from the node's
status. All processes run on this machine, over loopback.

    python -m scenarios.bench.first_rollout
    python -m scenarios.bench.first_rollout --cold --model ~/models/SmolLM2-135M --json

`--cold`: modules and kernels are compiled anew, as on a machine on which swarm-node never ran.
"""

import json
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from node.host.port import free_port
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.processes import ProcessFailed
from scenarios.harness.swarm import LOOPBACK, swarm_in

__all__ = ["PHASES", "main", "measure"]

PHASES: Final = {
    "starting": "the program has started",
    "joined": "reached the swarm",
    "caught_up": "the model's bits are proven",
    "ready": "the engine generates",
    "answered": "first accepted rollout",
}
"""In order: what has happened by then. `ready` and `answered` are no events of the node's log."""
WITHIN_S: Final = 300.0


def measure(folder: Path, model: Path, *, cold: bool) -> dict[str, float]:
    """Seconds from the start of `join` to each of `PHASES`. Raises `ProcessFailed`."""
    with ExitStack() as stack:
        swarm = stack.enter_context(swarm_in(folder))
        swarm.seed(model)
        port = free_port()
        swarm.start("gateway", "gateway", "--at", f"127.0.0.1:{port}", SWARM_HOME=str(swarm.home("seed")))
        swarm.wait("the gateway answers", lambda: _get(f"http://127.0.0.1:{port}/v1/models") is not None)
        ticket = swarm.ticket("--nodes", "1")
        client = _Client(f"http://127.0.0.1:{port}/v1/completions")
        caches = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX")
        variables = {name: str(folder / "cache") for name in caches} if cold else {}
        ready_at: float | None = None

        def is_done() -> bool:
            nonlocal ready_at
            if ready_at is None and (status := swarm.status("box")) is not None and status.nodes[0].engine is not None:
                ready_at = time.time()
            return ready_at is not None and client.answered_at is not None

        began = time.time()
        swarm.start("box", "join", ticket, "--model", str(model), "--name", "box", *LOOPBACK, **variables)
        swarm.wait("the first rollout is accepted", is_done, WITHIN_S, of=["box"])
        assert ready_at is not None
        assert client.answered_at is not None
        at = _event_times(swarm.log("box", 1 << 20)) | {"ready": ready_at, "answered": client.answered_at}
        if missing := [event for event in PHASES if event not in at]:
            raise ProcessFailed(f"the node's log has no {missing}\n{swarm.logs()}")
        return {event: at[event] - began for event in PHASES}


def _event_times(log: str) -> dict[str, float]:
    """When each event was logged first, as Unix time."""
    times: dict[str, float] = {}
    for line in log.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            times.setdefault(entry["event"], datetime.fromisoformat(entry["timestamp"]).timestamp())
    return times


class _Client:
    """Asks for one completion until it is answered, and notes when that was."""

    def __init__(self, url: str) -> None:
        self.answered_at: float | None = None
        threading.Thread(target=self._ask, args=(url,), daemon=True).start()

    def _ask(self, url: str) -> None:
        body = json.dumps({"model": "policy", "prompt": [2, 3, 4], "max_tokens": 4}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + WITHIN_S
        while self.answered_at is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
                    answer.read()
                self.answered_at = time.time()
            except OSError:  # 503 while there is no node yet
                time.sleep(0.2)


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read()
    except OSError:
        return None


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: the model `tiny`, made now)")
    parser.add_argument("--cold", action="store_true", help="compile modules and kernels anew")
    options = parser.parse_args()
    model = options.model or _tiny()
    with tempfile.TemporaryDirectory(prefix="first-rollout-") as folder:
        seconds = measure(Path(folder), model, cold=options.cold)
    if options.json:
        print(json.dumps({"scenario": "first_rollout", "cold": options.cold, "seconds": seconds}, indent=1))
    else:
        print_table(seconds)
    return 0


def print_table(seconds: dict[str, Any]) -> None:
    before = 0.0
    for event, words in PHASES.items():
        print(f"{words:32} {seconds[event] - before:6.1f} s {seconds[event]:7.1f} s since the line was pasted")
        before = seconds[event]


def _tiny() -> Path:
    from node.trainers.grpo.tiny import tiny_folder

    return tiny_folder(lambda *_: None)


if __name__ == "__main__":
    run_as_program(main)
