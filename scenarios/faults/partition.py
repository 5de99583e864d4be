"""A partition among real processes on emulated links, which heals: how soon the far side has the head again.

    python -m scenarios.faults.partition                             both directions, a minute, preset lan
    python -m scenarios.faults.partition --minutes 10 --preset wan --every-s 20 --model-mb 200
    python -m scenarios.faults.partition --one-way in out            lost: what goes to the far side; what comes from it

Needs root: each machine is a network namespace (`scenarios.emulator.network`). A seed and the nodes `a` and `b` are the
near side, `c` and `d` the far side. While the network is cut in two, the trainer publishes a version every `--every-s`
seconds, which the near side must have before the next one. Then the network heals, and the far side must get the head.

*near s*: the longest time until the near side had a version. *healed s*: from when the network healed until the last
far node held the head. *fresh s*: then new nodes, as many as the far side has, start with the same old model; from when
the first one looks for the swarm until the last one holds the head. *x*: healed by fresh.

Exits with 1 if a node does not get a version, if a log speaks of two versions of one number, or if *x* is above
`--most` (0: any). `python -m scenarios.sim.partition` does the same with hundreds of nodes under the virtual clock.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.emulator.network import Host, Network
from scenarios.faults.small_model import SmallModel
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.processes import ProcessFailed
from scenarios.harness.swarm import Swarm, swarm_in
from scenarios.sim.rows import number, show, verdict
from swarm.transport.base import Unreachable

__all__ = ["main", "partition"]

PORT: Final = 4701
WITHIN_S: Final = 180.0
"""Time limit of each wait."""
NEAR: Final = ("a", "b")
FAR: Final = ("c", "d")
FRESH: Final = ("e", "f")
ELEMENTS: Final = 30_000
TENSOR_MB: Final = 2 * ELEMENTS / 1e6
UP_MBIT: Final = 50.0
RTT_MS: Final = 40.0
COLUMNS: Final = {
    "one way": lambda row: row["one_way"] or "no",
    "minutes": number("minutes", "g"),
    "versions": number("versions", "d"),
    "near s": number("near_s", ".2f"),
    "healed s": number("healed_s", ".2f"),
    "fresh s": number("fresh_s", ".2f"),
    "x": number("ratio", ".2f"),
}


def partition(
    folder: Path, *, minutes: float, one_way: str, preset: str, every_s: float, seed: int, model_mb: float = 2.4
) -> dict[str, Any]:
    """Run one partition in `folder`. Returns its row. Raises `ProcessFailed`, and `UsageError` without root."""
    network = Network(rtt_ms=RTT_MS, seed=seed)
    names = ("seed", *NEAR, *FAR, *FRESH)
    hosts = {name: network.host(name, up_mbit=UP_MBIT, down_mbit=4 * UP_MBIT) for name in names}
    model = SmallModel(folder, tensors=max(1, round(model_mb / TENSOR_MB)), elements=ELEMENTS, seed=seed)
    with network, swarm_in(folder / "swarm", on=lambda name: hosts[name].popen, patience_s=WITHIN_S) as swarm:
        swarm.start("seed", "seed", "--base", str(model.base), "--listen", f"0.0.0.0:{PORT}", "--preset", preset,
                    "--announce", f"{hosts['seed'].address}:{PORT}")  # fmt: skip
        swarm.wait("the seed serves", swarm.status, of=["seed"])
        ticket = swarm.ticket("--nodes", str(len(names)))
        for name in (*NEAR, *FAR):
            _join(swarm, name, ticket, model)
        _until(swarm, (*NEAR, *FAR), model)
        old = model.base
        _cut(network, [hosts[name] for name in ("seed", *NEAR)], [hosts[name] for name in FAR], one_way)
        ends, took = time.monotonic() + 60 * minutes, []
        while time.monotonic() < ends:
            began = time.monotonic()
            swarm.publish(model.next_step())
            _until(swarm, NEAR, model)
            took.append(time.monotonic() - began)
            time.sleep(max(0.0, min(ends, began + every_s) - time.monotonic()))
        if any(_holds(swarm, name, model.root) for name in FAR):
            raise ProcessFailed("A far node holds the head before the network healed: the cut does not cut.")
        network.heal()
        healed_at = time.time()
        _until(swarm, FAR, model)
        healed_s = max(_held_at(swarm, name, model) for name in FAR) - healed_at
        for name in FRESH:
            _join(swarm, name, ticket, model, old)
        _until(swarm, FRESH, model)
        began_at = min(swarm.until_event(name, "starting") for name in FRESH)
        fresh_s = max(_held_at(swarm, name, model) for name in FRESH) - began_at
        for name in names:
            if '"equivocation"' in swarm.log(name, 1 << 26):
                raise ProcessFailed(f"{name} saw two versions of one number: {swarm.log(name)}")
    return {
        "one_way": one_way, "minutes": minutes, "versions": len(took), "near_s": max(took), "healed_s": healed_s,
        "fresh_s": fresh_s, "ratio": healed_s / fresh_s,
    }  # fmt: skip


def _cut(network: Network, near: list[Host], far: list[Host], one_way: str) -> None:
    if one_way != "out":
        network.cut(near, far)
    if one_way != "in":
        network.cut(far, near)


def _join(swarm: Swarm, name: str, ticket: str, model: SmallModel, folder: Path | None = None) -> None:
    words = ("--engine", "none", "--listen", f"0.0.0.0:{PORT}", "--name", name, "--up-mbit", str(UP_MBIT))
    swarm.start(name, "join", ticket, *words, "--model", str(folder or model.base))


def _holds(swarm: Swarm, name: str, root: str) -> bool:
    try:
        return swarm.own_status(name).root == root
    except Unreachable:
        return False


def _until(swarm: Swarm, names: Sequence[str], model: SmallModel) -> None:
    """Wait until all of these nodes hold the newest step."""
    goal = f"{', '.join(names)} hold step {model.step}"
    swarm.wait(goal, lambda: all(_holds(swarm, name, model.root) for name in names))


def _held_at(swarm: Swarm, name: str, model: SmallModel) -> float:
    """When a node held the newest step, in seconds since the epoch, by its log."""
    return swarm.until_event(name, "holds", version=f"0.{model.step}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the network is cut (default 1)")
    parser.add_argument("--one-way", nargs="*", choices=("in", "out"), default=[], help="rows in which one way is cut")
    parser.add_argument("--preset", choices=("wan", "lan", "loopback"), default="lan", help="of the seed (default lan)")
    parser.add_argument("--every-s", type=float, default=10.0, help="from publish to publish (default 10)")
    parser.add_argument("--model-mb", type=float, default=2.4, help="size of the model (default 2.4)")
    parser.add_argument("--most", type=float, default=1.3, help="of x; 0: it is printed only (default 1.3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep everything in this new folder; default: a temporary one")
    options = parser.parse_args(arguments)
    folder, rows, failed = options.folder or Path(tempfile.mkdtemp(prefix="partition-")), [], []
    for one_way in options.one_way or [""]:
        try:
            row = partition(
                folder / (one_way or "both"), minutes=options.minutes, one_way=one_way, preset=options.preset,
                every_s=options.every_s, seed=options.seed, model_mb=options.model_mb,
            )  # fmt: skip
        except UsageError as error:
            failed.append(f"{error} (logs: {folder})")
            break
        rows.append(row)
        if options.most and row["ratio"] > options.most:
            failed.append(f"the far side took {row['ratio']:.2f} times as long as new nodes (logs: {folder})")
    if rows or options.json:
        show("partition", rows, as_json=options.json, columns=COLUMNS)
    if not failed and options.folder is None:
        shutil.rmtree(folder)
    return verdict("partition", failed)


if __name__ == "__main__":
    run_as_program(main)
