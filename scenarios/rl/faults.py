"""What failing nodes cost: 1 % to 20 % of them are killed, hang or lie in every step.

    python -m scenarios.rl.faults                    # 32 nodes, 10 steps a row: minutes each
    python -m scenarios.rl.faults --seeds 5 --plot faults.png
    python -m scenarios.rl.faults --real             # five real nodes, of which two are left: about two minutes

Under the virtual clock (`scenarios.rl.ledger_sim`) each fault happens at a random moment, and no peer is notified. A
third of the failing nodes are killed (they send nothing any more), a third hang (they send messages but generate no
token), and a third lie (they sign invented log-probabilities). Ten seconds after each fault another node joins.
Training is one step ahead, a group may be one version old, and a sample takes half a step.

- *lost*: tokens that were generated but neither trained on nor still useful, without those that are also lost in a run
  without faults (*aged*: samples that became too old).
- *drawing*: tokens that the failed nodes were generating or had not delivered when they failed; for lying nodes also
  all that they generated since. A killed node loses all of these.
- *at stake*: *drawing*, and the delivered tokens of incomplete groups, which count only if the rest of the group is
  generated before they are too old. For lying nodes: all tokens not handed over, since it is unknown when they began.
- *step*: mean time of a step, divided by that of a run without faults.
- *invented*: share of lying nodes' samples among those trained on.

The scenario fails if *lost* exceeds *drawing*, or *step* exceeds its limit. With `--seeds` the counts are sums over all
seeds, and *worst* is the largest share of the stake that a seed lost. For `--real` see `scenarios.rl.faults_real`.
"""

import json
import logging
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import trio

from node.ledger.settings import Settings
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.plot import drawing, png
from scenarios.rl.faults_real import real
from scenarios.rl.ledger_sim import Fault, Kind, LedgerSim, Trainer, virtually

RATES: Final = (0.01, 0.05, 0.1, 0.2)
FAULTS: Final[tuple[Fault, ...]] = ("killed", "stalled", "lying")
REPLACED_AFTER_S: Final = 10.0
KIND: Final = Kind()
SAMPLES: Final = 8
"""Samples of a prompt."""
TRAIN_S: Final = 5.0
WARM_UP: Final = 2
"""Steps before the measurement, in which the ledger learns rates and arrival times."""
REACH_STEP: Final = 1.2


def step_s(nodes: int, groups: int) -> float:
    """Return the expected seconds of a step: its tokens divided by the nodes' rates."""
    return groups * SAMPLES * KIND.mean / (nodes * KIND.rows * KIND.tokens_s)


async def run(share: float, steps: int, nodes: int, groups: int, check: float, seed: int) -> dict[str, Any]:
    """Run under the virtual clock; in every step each node fails with probability `share`."""
    chance = random.Random(seed)
    expected_s = step_s(nodes, groups)
    struck: list[Any] = []
    kinds = cycle(FAULTS)
    async with trio.open_nursery() as nursery:
        ledger_sim = LedgerSim(nursery, Settings(check_share=check), seed)
        await nursery.start(ledger_sim.service.run)
        for _ in range(nodes):
            await ledger_sim.hire(KIND)
        trainer = Trainer(ledger_sim, groups, SAMPLES, train_s=TRAIN_S, max_tokens=2 * KIND.mean)

        async def strike(member: Any, after_s: float, fault: Fault) -> None:
            await trio.sleep(after_s)
            ledger_sim.strike(member, fault)
            struck.append(member)
            await trio.sleep(REPLACED_AFTER_S)
            await ledger_sim.hire(KIND)

        for _ in range(WARM_UP):
            await trainer.step()
        drawn, kept, taken = ledger_sim.drawn, ledger_sim.kept, trainer.taken_tokens
        times = []
        for _ in range(steps):
            for member in [m for m in ledger_sim.members.values() if m.fault is None]:
                if chance.random() < share:
                    nursery.start_soon(strike, member, chance.uniform(0, expected_s), next(kinds))
            times.append(await trainer.step())
        lost = (ledger_sim.drawn - drawn) - (trainer.taken_tokens - taken) - (ledger_sim.kept - kept)
        report = ledger_sim.service.status()
        result = {
            "share": share,
            "struck": len(struck),
            "steps_s": times,
            "mean_step_s": statistics.fmean(times),
            "drawn": ledger_sim.drawn - drawn,
            "lost": lost,
            "drawing": (drawing := sum(ledger_sim.drawing(member) for member in struck)),
            "at_stake": drawing + sum(member.delivered for member in struck),
            "trained_on": trainer.taken,
            "invented": trainer.invented,
            "refused": report.refused,
            "quarantined": sum(node.quarantine is not None for node in report.nodes.values()),
            "useful": report.generating,
        }
        nursery.cancel_scope.cancel()
    ledger_sim.book.close()
    return result


def simulate(
    shares: Sequence[float],
    *,
    steps: int = 10,
    nodes: int = 32,
    groups: int = 256,
    check: float = 0.02,
    seeds: Iterable[int] = (0,),
) -> list[dict[str, Any]]:
    """Return a row without faults, then one for each share. A row's `runs` has one row for each seed."""
    found: dict[float, list[dict[str, Any]]] = {}
    for share in (0.0, *shares):
        for seed in seeds:
            row = virtually(run, share, steps, nodes, groups, check, seed)
            found.setdefault(share, []).append(row)
            print(
                f"{share:.0%} of the nodes fail in each step, seed {seed}: {row['struck']} nodes",
                file=sys.stderr,
                flush=True,
            )
    calm = _sum(found[0.0])
    return [_against(calm, _sum(runs)) | {"runs": [_against(calm, each) for each in runs]} for runs in found.values()]


def _sum(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add the counts and average the means."""
    means = ("share", "mean_step_s", "useful")
    counts = (key for key in runs[0] if isinstance(runs[0][key], int) and key not in means)
    return {key: statistics.fmean(row[key] for row in runs) for key in means} | {
        key: sum(row[key] for row in runs) for key in counts
    }


def _against(calm: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with what the faults cost, compared with the run without faults."""
    aged = round(row["drawn"] * calm["lost"] / calm["drawn"])
    lost = row["lost"] - aged
    return row | {
        "step_ratio": row["mean_step_s"] / calm["mean_step_s"],
        "aged": aged,
        "lost_to_faults": lost,
        "lost_of_drawing": lost / row["drawing"] if row["drawing"] else 0.0,
        "lost_of_stake": lost / row["at_stake"] if row["at_stake"] else 0.0,
    }


def met(row: dict[str, Any]) -> bool:
    """Return whether a row is within the limits."""
    return row["lost_to_faults"] <= row["drawing"] and row["step_ratio"] <= REACH_STEP


def real_met(found: dict[str, Any]) -> bool:
    """Return whether honest nodes lost nothing, the lying node was quarantined, and the steps took no longer than
    allowed in total. Single steps may differ, because groups are taken ahead of their step."""
    seconds, expected_s = (sum(step[name] for step in found["steps"]) for name in ("seconds", "expected_s"))
    lost = sum(found["lost_by_the_honest"].values())
    return not lost and found["liar_aside"] and seconds <= REACH_STEP * expected_s


def _real_table(found: dict[str, Any]) -> str:
    lines = [f"{'step':>6}  {'seconds':>8}  {'expected':>15}  {'x':>5}"]
    for number, step in enumerate(found["steps"]):
        lines.append(f"{number + 1:>6}  {step['seconds']:>8.1f}  {step['expected_s']:>15.1f}  {step['ratio']:>5.2f}")
    lines.append(f"tokens lost by nodes without a fault: {found['lost_by_the_honest']}")
    lines.append(
        f"the lying node is {'in quarantine' if found['liar_aside'] else 'NOT FOUND'}; checks: {found['checks']}"
    )
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "fail a step", "nodes", "aged", "lost", "drawing", "at stake", "lost of it", "worst", "step", "invented",
        "generating",
    )  # fmt: skip
    cells = [
        (
            f"{row['share']:.0%}", str(row["struck"]), f"{row['aged'] / row['drawn']:.1%}",
            f"{row['lost_to_faults']:,}", f"{row['drawing']:,}", f"{row['at_stake']:,}", f"{row['lost_of_stake']:.2f}",
            f"{max(each['lost_of_stake'] for each in row['runs']):.2f}", f"{row['step_ratio']:.3f}",
            f"{row['invented'] / max(1, row['trained_on']):.2%}", f"{row['useful']:.1%}",
        )
        for row in rows
    ]  # fmt: skip
    return "\n".join("  ".join(f"{cell:>13}" for cell in line) for line in (head, *cells))


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    shares = [100 * row["share"] for row in rows]
    with drawing(path, 2, inches=(8, 3.2)) as (left, right):
        left.plot(shares, [row["step_ratio"] for row in rows], "o-")
        left.axhline(REACH_STEP, color="grey", linestyle="--", linewidth=1)
        left.set(xlabel="nodes that fail in a step, %", ylabel="step time, x without faults", ylim=(0.9, 1.3))
        right.plot(shares, [row["lost_to_faults"] / 1e3 for row in rows], "o-", label="lost")
        right.plot(shares, [row["drawing"] / 1e3 for row in rows], "s:", color="grey", label="being drawn")
        right.plot(shares, [row["at_stake"] / 1e3 for row in rows], "s--", color="grey", label="at stake")
        right.set(xlabel="nodes that fail in a step, %", ylabel="thousand tokens")
        right.legend()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=RATES,
        help="shares of the nodes that fail in a step (default .01 .05 .1 .2)",
    )
    parser.add_argument("--steps", type=int, default=10, help="steps per row (default 10)")
    parser.add_argument("--nodes", type=int, default=32, help="nodes at any time (default 32)")
    parser.add_argument("--groups", type=int, default=256, help="groups of 8 samples per step (default 256)")
    parser.add_argument(
        "--check-share", type=float, default=0.02, help="share of samples that another node scores (default 0.02)"
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed of the random faults (default 0)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default 1)")
    parser.add_argument("--plot", type=png, help="draw a PNG at this path")
    parser.add_argument("--real", action="store_true", help="real processes instead of the virtual clock")
    options = parser.parse_args(arguments)
    if (
        options.seeds < 1
        or options.steps < 1
        or options.nodes < 2
        or options.groups < 1
        or not all(0 <= s <= 1 for s in options.shares)
    ):
        parser.error("--seeds, --steps and --groups: at least 1; --nodes: at least 2; --shares: 0 to 1")
    logging.getLogger("node").setLevel(logging.ERROR)  # refusals of lying nodes are expected here
    if options.real:
        found = real()
        print(json.dumps({"scenario": "rl_faults"} | found) if options.json else _real_table(found))
        return 0 if real_met(found) else 1
    rows = simulate(
        options.shares, steps=options.steps, nodes=options.nodes, groups=options.groups,
        check=options.check_share, seeds=range(options.seed, options.seed + options.seeds),
    )  # fmt: skip
    print(json.dumps({"scenario": "rl_faults", "clock": "virtual", "rows": rows}) if options.json else _table(rows))
    if options.plot is not None:
        _draw(rows, options.plot)
    return 0 if all(met(row) for row in rows) else 1


if __name__ == "__main__":
    run_as_program(main)
