"""What a swarm costs a trainer, and whether it changes anything: real processes on this machine.

    python -m scenarios.trainers.overhead [--json]

publish_over_copy   time of `publish` in the training loop / time of copying the same weights once; median
first_chunk_at      share of the blocks that were diffed when the seed had sent its first piece to a node
encode_2_ranks      extraction and encoding of one version by one rank / by two that share it, a thread each
roots_equal         FSDP2, 2 and 3 ranks on gloo: the root that each rank was told, against the gathered bf16 checkpoint
same_trajectory     fp32 masters after the last step, with publishing and without it, compared bit for bit

Measure with nothing else running. Ends with code 1 when something is not as it should be.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError

__all__ = ["main", "ranks"]

REACH: Final = {"publish_over_copy": 1.1, "first_chunk_at": 0.2, "encode_2_ranks": 1.7}
RANKS_WITHIN_S: Final = 240.0


def ranks(world: int, steps: int) -> dict[str, Any]:
    """Train with and without a swarm. What all ranks agree on."""
    from scenarios.harness.processes import swarm_on
    from scenarios.trainers.trainer_ranks import write_base

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base(folder / "base")
        with swarm_on(folder, folder / "base", nodes=1) as swarm:
            on = _run(folder / "on", world, steps, str(swarm.home), str(folder / "base"))
        off = _run(folder / "off", world, steps)
    equal = [one["roots"] == one["gathered"] == on[0]["roots"] for one in on]
    masters = {one["masters"] for one in (*on, *off)}
    return {
        "roots_equal": all(equal) and len(set(on[0]["roots"])) == steps,
        "same_trajectory": len(masters) == 1,
        "steps": steps,
    }


def _run(meet: Path, world: int, steps: int, *more: str) -> list[dict[str, Any]]:
    words = [str(world), str(steps), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "scenarios.trainers.trainer_ranks", str(meet), str(rank), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        found = []
        for process in running:
            out, err = process.communicate(timeout=RANKS_WITHIN_S)
            if process.returncode:
                raise UsageError(f"A rank ended with {process.returncode}: {err.decode()[-800:]}")
            found.append(json.loads(out.decode().strip().split("\n")[-1]))
        return found
    finally:
        for process in running:
            process.kill()
            process.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--tensors", type=int, default=16, help="of the model that costs are measured on")
    parser.add_argument("--blocks", type=int, default=16, help="of 2^20 elements, in each")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    from scenarios.trainers.trainer_cost import cost, scaling

    try:
        scaled = scaling(options.tensors, options.blocks, tries=3)  # before torch has threads: it forks
        found: dict[str, Any] = {"cost": cost(options.tensors, options.blocks, options.steps), "encoding": scaled}
        for world in (2, 3):
            found[f"ranks_{world}"] = ranks(world, steps=4)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    rows = _rows(found)
    found["reached"] = all(ok for _, _, _, ok in rows)
    if options.json:
        print(json.dumps(found))
    else:
        print(f"{'what':<34}{'measured':>12}{'goal':>10}")
        for name, value, goal, ok in rows:
            print(f"{name:<34}{value:>12}{goal:>10}{'' if ok else '   missed'}")
    return 0 if found["reached"] else 1


def _rows(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """(what, measured, goal, whether it was reached)."""
    over, first = found["cost"]["publish_over_copy"], found["cost"]["first_chunk_at"]
    speedup = found["encoding"]["speedup"]
    most, before, least = REACH["publish_over_copy"], REACH["first_chunk_at"], REACH["encode_2_ranks"]
    rows = [
        ("publish / copying once", f"{over:.2f}", f"<= {most}", over <= most),
        ("diffed at the first piece sent", f"{first:.1%}", f"< {before:.0%}", first < before),
        ("encoding, 1 rank / 2 ranks", f"{speedup:.2f}", f">= {least}", speedup >= least),
    ]
    for world in (2, 3):
        for name in ("roots_equal", "same_trajectory"):
            ok = found[f"ranks_{world}"][name]
            rows.append((f"{name.replace('_', ' ')}, {world} ranks", "yes" if ok else "no", "yes", ok))
    return rows


if __name__ == "__main__":
    sys.exit(main())
