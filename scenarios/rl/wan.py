"""What a training run loses to the network: published models and step times, some rates and regions, virtual time.

    python -m scenarios.rl.wan                                   all three models, 0.25 to 10 Gbit/s, 1 to 4 regions
    python -m scenarios.rl.wan --size 8b --gbit 0.5 --regions 4  one case
    python -m scenarios.rl.wan --size 4b --plot wan.png --json > wan.json
    python -m scenarios.rl.wan --size 14b --no-full              without the full broadcasts beside it
    python -m scenarios.rl.wan --payload swarm                   deltas as swarm-node codes them, not as published
    python -m scenarios.rl.wan --size 8b --spread 0.5            completions from half to one and a half of the mean

Asynchronous by one step. The product's protocol, ledger and workers run; engines, trainer and links are modelled, from
`scenarios/rl/compute/published.toml` (every number with its source; `--compute` takes another). `share` is of the
tokens a second that the same code makes of a network without delay and limit, and those, `of ideal`, of what the
engines draw when they never wait. `sync` is the share where nobody is ahead: draw, train, extract, send. Beside it, in
the same run, full weights: a copy to each region (as the published comparison has it), to each node, and one copy in
all, which every node has when the trainer has sent it. Their links lose nothing. `x` is our gain over each in turn
(draw, train, send: simulated), `ahead` over one that is one step ahead as well as anybody could be (arithmetic).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.plot import drawing, png
from scenarios.sim.virtual.compute import PUBLISHED, Compute, Run
from scenarios.sim.virtual.links import PACKET_OVERHEAD
from scenarios.sim.virtual.training import Outcome, Wan, train

__all__ = ["SYNC_STEPS", "common", "main", "run_of", "say", "wan_of"]

SIZES: Final = ("4b", "8b", "14b")
GBITS: Final = (0.25, 0.5, 0.75, 1.0, 10.0)
AT_GBIT: Final = 0.5
"""The rate at which regions are added: the least of the published link."""
SYNC_STEPS: Final[dict[str, Any]] = {"warm": 2, "steps": 2}
"""Where nobody is ahead steps are alike, once the trainer's uplink has what it sends all the time."""
NATIVE: Final = (0.5, 1.0)
"""What that link gives, Gbit/s."""
ALIKE: Final = {1: 0.75, 4: 0.5}
"""Regions of the published runs of 4B, and the rate at which full copies to each, sent without a pause, make what was
published of those."""
HEAD: Final = (
    "model", "Gbit/s", "regions", "tokens/s", "of ideal", "share", "publ.", "sync", "transfer s", "copies", "waste",
    "x full", "ahead", "x star ahead", "x one copy", "ahead",
)  # fmt: skip
WAYS: Final = {"regions": ("in_turn", "at_best"), "star": ("at_best",), "relayed": ("in_turn", "at_best")}


def common(doc: str | None) -> argparse.ArgumentParser:
    """The options that the simulated training runs share."""
    made = json_parser(doc)
    made.add_argument("--compute", type=Path, default=PUBLISHED, help="what models compute (default: published.toml)")
    made.add_argument("--congestion", choices=("reno", "bbr"), default="reno", help="what kernels do (default reno)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--plot", type=png, help="draw a PNG")
    made.add_argument("--spread", type=float, help="completions are so much longer or shorter (default: input file's)")
    made.add_argument("--batches", action="store_true", help="engines whose batches end with their longest sequence")
    return made


def run_of(options: argparse.Namespace, compute: Compute, model: str, payload: str, *, synchronous: bool) -> Run:
    """The run of a model, as the options have it. Raises `UsageError`."""
    run = compute.run(model, payload=payload, synchronous=synchronous)
    if options.spread is not None and not 0 <= options.spread < 1:
        raise UsageError("--spread lies between 0 and 1: a half is from half to one and a half of the mean.")
    return replace(
        run, continuous_batching=not options.batches, spread=run.spread if options.spread is None else options.spread
    )


def wan_of(compute: Compute, gbit: float | None, regions: int, congestion: str) -> Wan:
    """The input file's regions, at this rate (None: free)."""
    figures = compute.wan
    round_trips = tuple(ms / 1000 for ms in figures["round_trip_ms"][:regions])
    if len(round_trips) < regions:
        raise UsageError(f"{compute.path.name} has {len(round_trips)} regions, not {regions}.")
    mbit = None if gbit is None else 1000 * gbit
    return Wan(mbit, round_trips, figures["within_ms"] / 1000, figures["loss"], congestion)


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    compute = Compute(options.compute)
    rows = list(_rows(options, compute))
    for row in rows:
        near = next((r for r in rows if (r["size"], r["gbit"], r["regions"]) == (row["size"], row["gbit"], 1)), None)
        row["lost_to_regions"] = None if near is None else 1 - row["tokens_s"] / near["tokens_s"]
    verdicts = _verdicts(rows, compute)
    if options.json:
        print(
            json.dumps(
                {"scenario": "rl_wan", "compute": options.compute.name, "rows": rows, "reach": verdicts}, indent=1
            )
        )
    else:
        _print(rows, verdicts)
    if options.plot is not None:
        _draw(rows, options.plot)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = common(__doc__)
    made.add_argument("--size", action="append", help="model of the input file (may be repeated; default 4b, 8b, 14b)")
    made.add_argument("--gbit", type=float, action="append", help="of every link (may be repeated; default 0.25 to 10)")
    made.add_argument("--regions", type=int, action="append", help="1 to 4 (may be repeated)")
    made.add_argument("--steps", type=int, default=4, help="steps that count (default 4)")
    made.add_argument("--warm", type=int, default=2, help="steps before those (default 2)")
    made.add_argument("--payload", choices=("published", "swarm"), default="published", help="a delta's size")
    made.add_argument("--no-full", dest="full", action="store_false", help="no full broadcasts beside it")
    return made.parse_args(arguments)


def _cases(options: argparse.Namespace) -> list[tuple[float, int]]:
    if options.gbit is None and options.regions is None:
        return [(gbit, 1) for gbit in GBITS] + [(AT_GBIT, regions) for regions in (2, 3, 4)]
    return [(gbit, regions) for gbit in options.gbit or [AT_GBIT] for regions in options.regions or [1]]


def _rows(options: argparse.Namespace, compute: Compute) -> Iterator[dict[str, Any]]:
    counted: dict[str, Any] = {"steps": options.steps, "warm": options.warm, "seed": options.seed}
    alike: dict[str, Any] = SYNC_STEPS | {"max_lag": 0, "seed": options.seed}

    @cache
    def free(size: str, regions: int, ahead: bool) -> Outcome:
        say(f"{compute.names[size]}, free network{'' if ahead else ', synchronous'}")
        run = run_of(options, compute, size, options.payload, synchronous=False)
        return train(run, wan_of(compute, None, regions, options.congestion), **(counted if ahead else alike))

    for size in options.size or SIZES:
        run = run_of(options, compute, size, options.payload, synchronous=False)
        for gbit, regions in _cases(options):
            baseline, in_turn = free(size, regions, True), free(size, regions, False)
            say(f"{run.name}, {gbit:g} Gbit/s, {regions} region{'s'[: regions > 1]}")
            wan = wan_of(compute, gbit, regions, options.congestion)
            ours = train(run, wan, **counted)
            say(f"    {ours.tokens_s:,.0f} tokens/s, {ours.tokens_s / baseline.tokens_s:.2%} of a free network")
            alternating = train(run, wan, **alike)
            full = _full(run, wan, baseline, options.seed) if options.full else {}
            yield {
                "size": size,
                "model": run.name,
                "gbit": gbit,
                "regions": regions,
                "tokens_s": ours.tokens_s,
                "free_tokens_s": baseline.tokens_s,
                "ideal_tokens_s": run.ideal_tokens_s,
                "share": ours.tokens_s / baseline.tokens_s,
                "sync_share": alternating.tokens_s / in_turn.tokens_s,
                "published_share": _published_share(compute, size),
                "full_tokens_s": full,
                "gain": {c: {how: ours.tokens_s / found[how] for how in found} for c, found in full.items()},
                "swarm": asdict(ours),
                "free": asdict(baseline),
                "sync": asdict(alternating),
                "sync_free": asdict(in_turn),
            }


def _full(run: Run, wan: Wan, free: Outcome, seed: int) -> dict[str, dict[str, float]]:
    """Tokens a second with full weights. `in_turn`: draw, train, send, as simulated. `at_best`: one step ahead as well
    as anybody could, the trainer's link never idle and nothing drawn in vain; or in turn, where that is more. A star is
    arithmetic only: so many copies keep the link busy either way."""
    assert wan.mbit is not None
    copy_s = run.full_bytes * 8e-6 * PACKET_OVERHEAD / wan.mbit
    step_s = run.samples * run.tokens * run.grain / free.tokens_s
    found: dict[str, dict[str, float]] = {}
    for carrier, copies in (("relayed", 1), ("regions", wan.regions), ("star", run.nodes)):
        found[carrier] = {"at_best": free.tokens_s * min(1.0, step_s / (copies * copy_s))}
        if carrier == "regions" and copies == 1:
            found[carrier] = found["relayed"]
        elif carrier != "star":
            say(f"    full weights: {carrier}")
            in_turn = train(run, wan, carrier, **SYNC_STEPS, max_lag=0, seed=seed).tokens_s
            found[carrier] = {"in_turn": in_turn, "at_best": max(in_turn, found[carrier]["at_best"])}
    return found


def _published_share(compute: Compute, size: str) -> float | None:
    figures = compute.models[size]
    achieved = figures.get("published_tokens_s")
    return None if achieved is None else achieved / figures["tokens_s"]


# ---------------------------------------------------------------- what it comes to


def _verdicts(rows: Sequence[dict[str, Any]], compute: Compute) -> list[dict[str, Any]]:
    """Asked, measured, published: of what was run."""
    found: list[dict[str, Any]] = []

    def add(
        what: str,
        reach: float,
        measured: list[float],
        worst: Callable[..., float],
        published: list[float],
        free: Sequence[float] = (),
    ) -> None:
        """`free`: what a free network would make of it."""
        if measured:
            value, possible = worst(measured), worst(free) if free else None
            met = value >= reach if worst is min else value <= reach
            found.append(
                {"what": what, "reach": reach, "measured": value, "published": published, "free": possible, "met": met}
            )

    theirs, reach = compute.published["sparrowrl"], compute.reach
    native = [row for row in rows if NATIVE[0] <= row["gbit"] <= NATIVE[1]]
    shares = [theirs["share_least"], theirs["share_most"]]
    gains = [theirs["gain_least"], theirs["gain_most"]]
    add("share of a free network, 0.5 to 1 Gbit/s", reach["share"], [row["share"] for row in native], min, shares)
    far = [row["lost_to_regions"] for row in rows if row["regions"] == 4 and row["lost_to_regions"] is not None]
    add("lost from 1 to 4 regions", reach["lost_to_4_regions"], far, max, [theirs["lost_to_4_regions"]])
    for how, words in (("in_turn", "in turn"), ("at_best", "one step ahead at best")):
        ones = [row["gain"]["regions"][how] for row in native if row["gain"]]
        possible = [_possible(row, how) for row in native if row["gain"]]
        what = f"gain over full weights to each region, {words}, 0.5 to 1 Gbit/s"
        add(f"least {what}", gains[0], ones, min, gains, possible)
        if ones:
            add(f"largest {what}", gains[1], [max(ones)], min, gains, [max(possible)])
    for row in rows:
        if row["size"] == "4b" and ALIKE.get(row["regions"]) == row["gbit"] and row["gain"]:
            one = row["regions"] == 1
            swarm = compute.models["4b"]["published_tokens_s"] if one else theirs["tokens_s_4_regions"]
            gain = swarm / theirs["full_1_region_tokens_s" if one else "full_4_regions_tokens_s"]
            what = f"{row['model']}, {row['regions']} region{'s'[: row['regions'] > 1]}, {row['gbit']:g} Gbit/s"
            reached, possible = [row["gain"]["regions"]["at_best"]], [_possible(row, "at_best")]
            add(f"gain over full weights, one step ahead at best, {what}", gain, reached, min, [gain], possible)
    return found


def _possible(row: dict[str, Any], how: str) -> float:
    """The gain that a free network would have."""
    return row["free_tokens_s"] / row["full_tokens_s"]["regions"][how]


def _print(rows: Sequence[dict[str, Any]], verdicts: Sequence[dict[str, Any]]) -> None:
    table: list[tuple[str, ...]] = [HEAD]
    for row in rows:
        published = row["published_share"]
        gains = [
            f"{row['gain'][carrier][how]:.1f}" if row["gain"] else "-" for carrier, ways in WAYS.items() for how in ways
        ]
        swarm = row["swarm"]
        table.append((
            row["model"], f"{row['gbit']:g}", str(row["regions"]), f"{row['tokens_s']:,.0f}",
            f"{row['free_tokens_s'] / row['ideal_tokens_s']:.1%}", f"{row['share']:.2%}",
            f"{published:.1%}" if published else "-", f"{row['sync_share']:.1%}", f"{swarm['transfer_s']:.1f}",
            f"{swarm['sent_copies']:.2f}", f"{swarm['wasted']:.1%}", *gains,
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for verdict in verdicts:
        published = " to ".join(f"{value:.3g}" for value in verdict["published"])
        free = "" if verdict["free"] is None else f", a free network {verdict['free']:.4g}"
        met = "" if verdict["met"] else "   MISSED"
        said = f"{verdict['measured']:.4g} (reach {verdict['reach']:.4g}, published {published}{free})"
        print(f"{verdict['what']}: {said}{met}")


def _draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    with drawing(path, 2, inches=(9.6, 3.8), sharey=True) as (left, right):
        for size in dict.fromkeys(row["size"] for row in rows):
            of = [row for row in rows if row["size"] == size]
            near = sorted((row for row in of if row["regions"] == 1), key=lambda row: row["gbit"])
            rate = max((row["gbit"] for row in of), key=lambda gbit: sum(row["gbit"] == gbit for row in of))
            far = sorted((row for row in of if row["gbit"] == rate), key=lambda row: row["regions"])
            for axes, chosen, key in ((left, near, "gbit"), (right, far, "regions")):
                at = [row[key] for row in chosen]
                (line,) = axes.plot(
                    at, [row["share"] for row in chosen], "o-", label=chosen[0]["model"] if chosen else size
                )
                if chosen and chosen[0]["gain"]:
                    full = [row["full_tokens_s"]["regions"]["at_best"] / row["free_tokens_s"] for row in chosen]
                    axes.plot(at, full, "s--", color=line.get_color(), alpha=0.6)
        left.set_xscale("log")
        left.set_xlabel("Gbit/s of every link, one region")
        right.set_xlabel("regions")
        left.set_ylabel("share of a free network's tokens/s")
        left.set_ylim(0, 1.05)
        left.legend(title="swarm; dashed: full copies to regions", fontsize=8, title_fontsize=8)


if __name__ == "__main__":
    run_as_program(main)
