"""The bandwidth that a training run needs: the lowest link rate that keeps 90 % of its tokens per second.

    python -m scenarios.rl.bandwidth                          a 7B model, a step of 50 s, as PULSE publishes it
    python -m scenarios.rl.bandwidth --model 14b --keep 0.99
    python -m scenarios.rl.bandwidth --rows ahead-swarm --within 0.05 --plot bandwidth.png --json

Every link has the same rate. The scenario finds the lowest one by bisection. Each try is a run under the virtual clock,
as in `scenarios.rl.wan`, and is compared with a run of the same code on a network without delay and rate limit.

Rows named `published` and `swarm` send a delta, of the published size or of the size that swarm-node codes. Rows named
`ahead` generate one step ahead of the trainer, which is the default of the swarm; rows named `sync` alternate between
computing and sending, which the published figures assume. Rows named `full` send one copy of the full weights, which
every node holds as soon as the trainer has sent it: no broadcast of full weights is faster.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.harness.command import run_as_program
from scenarios.harness.plot import drawing
from scenarios.rl.wan import SYNC_STEPS, common, run_of, say, wan_of
from scenarios.sim.virtual.compute import Compute
from scenarios.sim.virtual.training import Carrier, train

__all__ = ["main"]

ROWS: Final[dict[str, tuple[Carrier, str, int]]] = {
    "ahead-published": ("swarm", "published", 1),
    "ahead-swarm": ("swarm", "swarm", 1),
    "sync-published": ("swarm", "published", 0),
    "sync-swarm": ("swarm", "swarm", 0),
    "full-ahead": ("relayed", "published", 1),
    "full-sync": ("relayed", "published", 0),
}
"""Row name -> (carrier of `scenarios.sim.virtual.training`, payload, steps that nodes are ahead of the trainer)."""
WORDS: Final = {
    "ahead-published": "delta as published, one step ahead",
    "ahead-swarm": "delta as we code it, one step ahead",
    "sync-published": "delta as published, synchronous",
    "sync-swarm": "delta as we code it, synchronous",
    "full-ahead": "full weights, one copy, one step ahead",
    "full-sync": "full weights, one copy, synchronous",
}
LEAST_GBIT: Final = 1e-3
MOST_GBIT: Final = 100.0


def main(arguments: list[str] | None = None) -> int:
    options_parser = common(__doc__)
    options_parser.add_argument("--model", default="7b", help="model of the input file (default 7b)")
    options_parser.add_argument("--keep", type=float, help="share of the tokens/s to keep (default: as published)")
    options_parser.add_argument("--regions", type=int, default=1, help="1 to 4")
    options_parser.add_argument("--rows", action="append", choices=tuple(ROWS), help="(may be repeated; default all)")
    options_parser.add_argument(
        "--within", type=float, default=0.05, help="precision of the rate: stop at this relative error (default 0.05)"
    )
    options_parser.add_argument("--steps", type=int, default=4, help="measured steps (default 4)")
    options = options_parser.parse_args(arguments)
    compute = Compute(options.compute)
    theirs = compute.published["pulse"]
    keep = theirs["utilisation"] if options.keep is None else options.keep
    if not 0 < keep < 1 or options.within <= 0:
        raise UsageError("--keep lies between 0 and 1, and --within above 0.")
    rows = [_row(name, options, compute, keep) for name in options.rows or ROWS]
    reach = compute.reach["gbit"]
    if options.json:
        print(json.dumps({"scenario": "rl_bandwidth", "keep": keep, "reach_gbit": reach, "rows": rows}, indent=1))
    else:
        _print(rows, keep, reach)
    if options.plot is not None:
        _draw(rows, keep, options.plot)
    return 0


def _row(name: str, options: argparse.Namespace, compute: Compute, keep: float) -> dict[str, Any]:
    carrier, payload, ahead = ROWS[name]
    run = run_of(options, compute, options.model, payload, synchronous=ahead == 0)
    counted = {"steps": options.steps, "warm": 3} if ahead else SYNC_STEPS

    def tokens_s(gbit: float | None) -> float:
        wan = wan_of(compute, gbit, options.regions, options.congestion)
        sent = "swarm" if gbit is None else carrier
        return train(run, wan, sent, **counted, max_lag=ahead, seed=options.seed).tokens_s

    free = tokens_s(None)
    tries: list[tuple[float, float]] = []

    def share(gbit: float) -> float:
        found = tokens_s(gbit) / free
        say(f"{WORDS[name]}: {gbit:.4g} Gbit/s keeps {found:.1%}")
        tries.append((gbit, found))
        return found

    bytes_sent = run.full_bytes if carrier != "swarm" else run.delta_bytes
    start = bytes_sent * 8e-9 / (40 if ahead else 10)  # first guess: sending takes 40 s, or 10 s if synchronous
    gbit = _least(share, keep, start, options.within)
    published = {"swarm": "gbit", "relayed": "full_gbit"}[carrier]
    return {
        "row": name,
        "what": WORDS[name],
        "model": run.name,
        "payload_bytes": bytes_sent,
        "gbit": gbit,
        "published_gbit": compute.published["pulse"][published] if options.model == "7b" else None,
        "free_tokens_s": free,
        "tries": sorted(tries),
    }


def _least(share: Any, keep: float, start: float, within: float) -> float:
    """The lowest rate in Gbit/s at which `share(rate)` is at least `keep`, at most a factor 1 + `within` too high.

    Doubles or halves the rate from `start` until the result is bracketed, and then bisects on a logarithmic scale.
    Raises `UsageError` above `MOST_GBIT`; does not search below `LEAST_GBIT`.
    """
    low, high = None, start
    while share(high) < keep:
        low, high = high, 2 * high
        if high > MOST_GBIT:
            raise UsageError(f"More than {MOST_GBIT:g} Gbit/s would be needed: is the step long enough?")
    while low is None:
        if high / 2 < LEAST_GBIT:
            return high
        if share(high / 2) >= keep:
            high /= 2
        else:
            low = high / 2
    while high / low > 1 + within:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if share(middle) >= keep else (middle, high)
    return high


def _print(rows: Sequence[dict[str, Any]], keep: float, reach: float) -> None:
    print(f"{rows[0]['model']}: lowest rate of every link that keeps {keep:.0%} of a free network's tokens/s")
    for row in rows:
        published = f", published {row['published_gbit']:g}" if row["published_gbit"] is not None else ""
        print(f"  {row['what']:<40} {row['payload_bytes'] / 1e6:>8,.0f} MB {row['gbit']:>8.3g} Gbit/s{published}")
    ours = [row["gbit"] for row in rows if row["row"].startswith("ahead")]
    if ours:
        print(f"reach {reach:g} Gbit/s: {max(ours):.3g}{'' if max(ours) <= reach else '   MISSED'}")


def _draw(rows: Sequence[dict[str, Any]], keep: float, path: Path) -> None:
    with drawing(path, inches=(6.4, 3.8)) as axes:
        for row in rows:
            axes.plot([gbit for gbit, _ in row["tries"]], [found for _, found in row["tries"]], "o-", label=row["what"])
        axes.axhline(keep, color="black", linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlabel("Gbit/s of every link")
        axes.set_ylabel("share of a free network's tokens/s")
        axes.legend(fontsize=7)


if __name__ == "__main__":
    run_as_program(main)
