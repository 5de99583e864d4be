"""What a training run loses to the network, for published models and step times, under the virtual clock.

    python -m scenarios.rl.wan                                   all three models, 0.25 to 10 Gbit/s, 1 to 4 regions
    python -m scenarios.rl.wan --size 8b --gbit 0.5 --regions 4  one case
    python -m scenarios.rl.wan --size 4b --plot wan.png --json > wan.json
    python -m scenarios.rl.wan --size 14b --no-full              without the comparison with full weights
    python -m scenarios.rl.wan --payload swarm                   deltas of the size that swarm-node codes
    python -m scenarios.rl.wan --size 8b --spread 0.5            completions of 0.5 to 1.5 times the mean length

The product's protocol, ledger and workers run, one step ahead of the trainer. Engines, trainer and links are modelled
with the figures of `scenarios/rl/compute/published.toml`, each with its source; `--compute` names another file.

- `of ideal`: tokens per second of the same code on a network without delay and rate limit, as a share of what the
  engines generate if they never wait.
- `share`: tokens per second as a share of those on that free network.
- `sync`: the same share if generating, training, extracting and sending alternate.
- `x`: the gain over full weights, which are sent as a copy to each region (as in the published comparison), as a star
  with a copy to each node, or as one copy that every node has as soon as the trainer has sent it. Their links lose no
  packets. In the columns named `x`, generating, training and sending alternate (simulated). In those named `ahead`,
  nodes are one step ahead in the best possible way (calculated).
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
from scenarios.sim.virtual.flow import PACKET_OVERHEAD
from scenarios.sim.virtual.training import Carrier, Outcome, Wan, train

__all__ = ["SYNC_STEPS", "common", "main", "run_of", "say", "wan_of"]

SIZES: Final = ("4b", "8b", "14b")
GBITS: Final = (0.25, 0.5, 0.75, 1.0, 10.0)
AT_GBIT: Final = 0.5
"""The link rate in Gbit/s at which regions are added: the lowest of the published link."""
SYNC_STEPS: Final[dict[str, Any]] = {"warm": 2, "steps": 2}
"""Steps of a synchronous run: they are alike once the trainer's uplink is busy all the time."""
NATIVE: Final = (0.5, 1.0)
"""The range of the published link, in Gbit/s."""
ALIKE: Final = {1: 0.75, 4: 0.5}
"""Number of regions of the published runs of 4B -> the link rate in Gbit/s at which back-to-back full copies to each
region reach the published tokens per second."""
HEAD: Final = (
    "model", "Gbit/s", "regions", "tokens/s", "of ideal", "share", "publ.", "sync", "transfer s", "copies", "waste",
    "x full", "ahead", "x star ahead", "x one copy", "ahead",
)  # fmt: skip
WAYS: Final = {"regions": ("in_turn", "at_best"), "star": ("at_best",), "relayed": ("in_turn", "at_best")}


def common(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all simulated training runs have."""
    options_parser = json_parser(doc)
    options_parser.add_argument(
        "--compute", type=Path, default=PUBLISHED, help="input file with the models' figures (default: published.toml)"
    )
    options_parser.add_argument(
        "--congestion", choices=("reno", "bbr"), default="reno", help="congestion control of the links (default reno)"
    )
    options_parser.add_argument("--seed", type=int, default=0)
    options_parser.add_argument("--plot", type=png, help="draw a PNG")
    options_parser.add_argument(
        "--spread",
        type=float,
        help="completions are 1 - SPREAD to 1 + SPREAD of the mean length (default: input file's)",
    )
    options_parser.add_argument(
        "--batches", action="store_true", help="engines whose batches last as long as their longest sequence"
    )
    return options_parser


def run_of(options: argparse.Namespace, compute: Compute, model: str, payload: str, *, synchronous: bool) -> Run:
    """Return the run of a model with these options. Raises `UsageError` if an option is out of range."""
    run = compute.run(model, payload=payload, synchronous=synchronous)
    if options.spread is not None and not 0 <= options.spread < 1:
        raise UsageError(
            "--spread must be at least 0 and below 1: with 0.5, completions are 0.5 to 1.5 times the mean length."
        )
    return replace(
        run, continuous_batching=not options.batches, spread=run.spread if options.spread is None else options.spread
    )


def wan_of(compute: Compute, gbit: float | None, regions: int, congestion: str) -> Wan:
    """Return the regions of the input file, with links of this rate (None: without delay and rate limit)."""
    figures = compute.wan
    round_trips = tuple(ms / 1000 for ms in figures["round_trip_ms"][:regions])
    if len(round_trips) < regions:
        raise UsageError(f"{compute.path.name} has {len(round_trips)} regions, not {regions}.")
    mbit = None if gbit is None else 1000 * gbit
    return Wan(mbit, round_trips, figures["within_ms"] / 1000, figures["loss"], congestion)


def say(line: str) -> None:
    """Print a progress line on standard error."""
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
    options_parser = common(__doc__)
    options_parser.add_argument(
        "--size", action="append", help="model of the input file (may be repeated; default 4b, 8b, 14b)"
    )
    options_parser.add_argument(
        "--gbit", type=float, action="append", help="rate of every link (may be repeated; default 0.25 to 10)"
    )
    options_parser.add_argument(
        "--regions", type=int, action="append", help="number of regions, 1 to 4 (may be repeated)"
    )
    options_parser.add_argument("--steps", type=int, default=4, help="measured steps (default 4)")
    options_parser.add_argument("--warm", type=int, default=2, help="steps before the measurement (default 2)")
    options_parser.add_argument(
        "--payload",
        choices=("published", "swarm"),
        default="published",
        help="size of a delta: as published, or as swarm-node codes it",
    )
    options_parser.add_argument(
        "--no-full", dest="full", action="store_false", help="skip the comparison with full weights"
    )
    return options_parser.parse_args(arguments)


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
    """Return the tokens per second with full weights, for each way to send them.

    `in_turn`: generating, training and sending alternate, simulated. `at_best`: one step ahead, with a trainer's link
    that is never idle and no wasted tokens, calculated; or `in_turn` where that is higher. A star is only calculated,
    since its copies keep the link busy in both cases."""
    assert wan.mbit is not None
    copy_s = run.full_bytes * 8e-6 * PACKET_OVERHEAD / wan.mbit
    step_s = run.samples * run.tokens * run.grain / free.tokens_s
    found: dict[str, dict[str, float]] = {}
    copies_sent: dict[Carrier, int] = {"relayed": 1, "regions": wan.regions, "star": run.nodes}
    for carrier, copies in copies_sent.items():
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


# ---------------------------------------------------------------- verdicts


def _verdicts(rows: Sequence[dict[str, Any]], compute: Compute) -> list[dict[str, Any]]:
    """Compare what was measured with the limits and with the published figures."""
    found: list[dict[str, Any]] = []

    def add(
        what: str,
        reach: float,
        measured: list[float],
        worst: Callable[..., float],
        published: list[float],
        free: Sequence[float] = (),
    ) -> None:
        """Append a verdict. `free`: the figures that a free network would reach."""
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
    """Return the gain that a free network would have."""
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
        figures = f"{verdict['measured']:.4g} (reach {verdict['reach']:.4g}, published {published}{free})"
        print(f"{verdict['what']}: {figures}{met}")


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
