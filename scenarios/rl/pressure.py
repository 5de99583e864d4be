"""How many tokens nodes generate that a slower trainer never uses.

    python -m scenarios.rl.pressure                    # half as fast, max_lag=1: each row under a minute
    python -m scenarios.rl.pressure --trainer 0.25 1 4 # a quarter as fast as its nodes, as fast, four times as fast
    python -m scenarios.rl.pressure --no-pace          # without the limit by the trainer's consumption
    python -m scenarios.rl.pressure --real --steps 10  # a real seed, node and engine: about four minutes

Under the virtual clock (`scenarios.rl.ledger_sim`) the code of the ledger and the nodes is the product's, and engines
are modelled. For `--real` see `scenarios.rl.pressure_real`. The columns:

- *trainer*: the trainer's speed divided by its nodes'; at 0.5 it computes twice as long as they generate a step.
- *held*: sequences that all engines generate at once, divided by the samples of a step.
- *gathers*: whether the trainer gathers a step's groups after its version is sealed, or already before.
- *drawn by used*: tokens that engines generated, divided by the tokens of samples that the trainer took.
- *stale*: samples that the status counts as never used, divided by those used; *useful*: as in the status.
- *step*: mean time of a step, divided by the longer of generating and computing.
- *lag*: the most versions from a sample's oldest token to the newest sealed version when the trainer got it.
- *waits*: the most steps from a prompt's offer until the trainer got its group, in the second half of the steps.
"""

import json
import logging
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import trio

from node.ledger.settings import Settings
from scenarios.harness.command import json_parser, run_as_program
from scenarios.rl.ledger_sim import Kind, LedgerSim, Trainer, virtually
from scenarios.rl.pressure_real import real

KIND: Final = Kind(rows=16, mean=400)
NODES: Final = 4
SAMPLES: Final = 8
HELD: Final = (0.25, 1.0, 4.0)
GATHERS: Final = ("after", "before")
SEAL_S: Final = 2.0
WARM_UP: Final = 4
"""Steps before the measurement, in which the ledger learns how much a step consumes."""
REACH: Final = 1.15


async def run(
    trainer: float, held: float, gathers: str, steps: int, max_lag: int, pace: bool, nodes: int = NODES
) -> dict[str, Any]:
    """Run one case and return its row."""
    at_once = nodes * KIND.rows
    groups = max(1, round(at_once / held / SAMPLES))
    sequence_s = KIND.mean / KIND.tokens_s
    draw_s = sequence_s * max(1.0, groups * SAMPLES / at_once)
    train_s = draw_s / trainer
    async with trio.open_nursery() as nursery:
        ledger_sim = LedgerSim(nursery, Settings(check_share=0.0))
        await nursery.start(ledger_sim.service.run)
        for _ in range(nodes):
            await ledger_sim.hire(KIND)
        training_loop = Trainer(
            ledger_sim, groups, SAMPLES, train_s=train_s, max_tokens=2 * KIND.mean, max_lag=max_lag,
            seal_s=SEAL_S if gathers == "before" else 0.0, paced=pace,
        )  # fmt: skip
        for _ in range(WARM_UP):
            await training_loop.step()
        drawn, tokens = ledger_sim.drawn, training_loop.taken_tokens
        before, began = ledger_sim.service.status(), trio.current_time()
        for _ in range(steps):
            await training_loop.step()
        after, seconds = ledger_sim.service.status(), trio.current_time() - began
        nursery.cancel_scope.cancel()
    ledger_sim.book.close()
    unused = after.samples_unused - before.samples_unused
    used = after.samples_used - before.samples_used
    return {
        "trainer": trainer,
        "held": held,
        "gathers": gathers,
        "max_lag": max_lag,
        "groups": groups,
        "drawn_by_used": (ledger_sim.drawn - drawn) / (training_loop.taken_tokens - tokens),
        "unused_by_used": unused / used,
        "useful": after.useful,
        "generating": after.generating,
        "step_ratio": seconds / steps / max(draw_s, train_s),
        "worst_lag": training_loop.worst_lag,
        "longest_wait_steps": max(training_loop.waits_steps[-steps * groups // 2 :]),
        "longest_wait_s": max(training_loop.waits_s[-steps * groups // 2 :]),
    }


def met(row: dict[str, Any]) -> bool:
    """Return whether a row reaches the target, which holds for `max_lag` 1 and a trainer at most half as fast as its
    nodes."""
    return row["trainer"] > 0.5 or row["max_lag"] != 1 or row["drawn_by_used"] <= REACH


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("trainer", "held", "gathers", "max_lag", "drawn by used", "stale", "useful", "step", "lag", "waits")
    cells = [
        (
            f"{row['trainer']:g}", f"{row['held']:g}", row["gathers"], str(row["max_lag"]),
            f"{row['drawn_by_used']:.3f}", f"{row['unused_by_used']:.1%}", f"{row['useful']:.0%}",
            f"{row['step_ratio']:.2f}", str(row["worst_lag"]), str(row["longest_wait_steps"]),
        )
        for row in rows
    ]  # fmt: skip
    return "\n".join("  ".join(f"{cell:>13}" for cell in line) for line in (head, *cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument(
        "--trainer",
        type=float,
        nargs="+",
        default=(0.5,),
        help="the trainer's speed divided by its nodes' (default 0.5)",
    )
    parser.add_argument(
        "--held",
        type=float,
        nargs="+",
        default=HELD,
        help="sequences that engines generate at once, divided by a step's samples",
    )
    parser.add_argument(
        "--gathers", choices=GATHERS, nargs="+", default=GATHERS, help="gather a step's groups before or after the seal"
    )
    parser.add_argument("--max-lag", type=int, default=1, help="largest age of a group in versions (default 1)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default 20)")
    parser.add_argument("--no-pace", action="store_true", help="do not limit samples by the trainer's consumption")
    parser.add_argument("--real", action="store_true", help="real processes: one row for each --trainer")
    options = parser.parse_args(arguments)
    if min(*options.trainer, *options.held) <= 0 or options.steps < 1 or options.max_lag < 0:
        parser.error("--trainer and --held: above 0; --steps: at least 1; --max-lag: at least 0")
    if options.real:
        if options.no_pace:
            parser.error("--no-pace: not with --real")
        return _real(options.trainer, options.steps, options.max_lag, options.json)
    logging.getLogger("node").setLevel(logging.ERROR)
    rows = []
    for trainer, held, gathers in product(options.trainer, options.held, options.gathers):
        row = virtually(run, trainer, held, gathers, options.steps, options.max_lag, not options.no_pace)
        rows.append(row)
        print(f"{trainer:g}, {held:g}, {gathers}: {row['drawn_by_used']:.3f}", file=sys.stderr, flush=True)
    print(json.dumps({"scenario": "rl_pressure", "rows": rows}) if options.json else _table(rows))
    return 0 if all(met(row) for row in rows) else 1


def _real(trainers: Sequence[float], steps: int, max_lag: int, as_json: bool) -> int:
    rows = [real(trainer, steps, WARM_UP, max_lag) for trainer in trainers]
    if as_json:
        print(json.dumps({"scenario": "rl_pressure", "rows": rows}))
    else:
        for row in rows:
            print(
                f"real: a trainer {row['trainer']:g} times as fast as its node, max_lag={row['max_lag']}: "
                f"{row['drawn_by_used']:.3f} tokens drawn for each used, over {row['steps']} steps"
            )
    return 0 if all(met(row) for row in rows) else 1


if __name__ == "__main__":
    run_as_program(main)
