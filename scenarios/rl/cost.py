"""Tokens a dollar of the published training runs, with the traffic of every machine priced.

    python -m scenarios.rl.cost                                        all runs, eight pairs of providers
    python -m scenarios.rl.cost --model 8b --provider aws/runpod       the trainer at AWS, the nodes at RunPod
    python -m scenarios.rl.cost --model 8b --plot cost.png --json
    python -m scenarios.rl.cost --same-delta                           the same bytes whatever the way
    python -m scenarios.rl.cost --joins-hour 2                         two machines an hour join and need the model

Nothing is run: this is arithmetic on the published runs of scenarios.rl.wan, scenarios.rl.bandwidth and
scenarios.rl.hetero, and on price lists with date and source (node/tools/prices.toml).

star-full  the trainer sends the full weights to each node
star       the trainer sends the published delta to each node
relays     the trainer sends it to one node of each region, which sends it to the others (SparrowRL)
store-free the trainer writes it to an object store, from which each node reads it (PULSE); reading is free
store-paid the same, and what is read costs money
swarm      the trainer sends our delta once, and nodes send it to one another

GPUs cost what the publications say, at every provider, so that rows differ in traffic alone. The trainer is in none of
the nodes' regions. Between regions of one provider, its own price applies; with `clouds`, each machine is at another
large one. `*` marks the most tokens a dollar, and every way within 0.1 % of it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from codec.errors import UsageError
from node.tools.prices import PRICES, PriceList, Store, price_list
from scenarios.harness.plot import drawing, png
from scenarios.rl.cost_model import WAYS, Bill, Links, Preset, Prices, bill, cheapest, crossing, preset_of
from scenarios.sim.virtual.compute import PUBLISHED, Compute

__all__ = ["main"]

MODELS: Final = ("4b", "8b", "14b", "7b", "8b-mixed")
DRAWN: Final = "8b"
PROVIDERS: Final = ("runpod", "aws/runpod", "vast", "aws/vast", "aws", "gcp", "azure", "clouds")
GBIT: Final = 0.5
"""The least rate of SparrowRL's link."""
MOST_BREAK_EVEN_USD_GB: Final = 10.0
"""Break-even prices are searched up to here: no provider charges more."""
LEAST_USD: Final = 1e-12
"""Dollars a step that are a rounding error."""
SAME_SHARE: Final = 0.001
"""Ways that differ by less count as equally cheap."""
MOST_USD_GB: Final = 0.15
"""The highest price of the plots."""
COLORS: Final = dict(
    zip(WAYS, ("tab:gray", "tab:red", "tab:orange", "tab:purple", "tab:brown", "tab:blue"), strict=True)
)
PRICES_USD_GB: Final = tuple(float(usd) for usd in np.geomspace(1e-4, MOST_USD_GB, 60))
"""Of the maps, up from what is practically free."""
LEVELS: Final = (-20, -10, -5, -1, 2, 5)
"""Percent by which the swarm is ahead, of the lines in the maps."""
NODES: Final = tuple(round(2 ** (k / 4)) for k in range(4, 41))
"""Numbers of nodes of the map: 2 to 1,024."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    compute, prices = Compute(options.compute), price_list(options.prices)
    links = _links(compute, options)
    stores = {"store-free": prices.store(options.free_store), "store-paid": prices.store(options.paid_store)}
    trainer_usd_gb = prices.provider(options.trainer).egress_usd_gb.usd
    presets = {model: preset_of(compute, model, options.bits) for model in options.model or MODELS}
    rows = [row for m, p in presets.items() for row in _rows(m, p, links, prices, stores, options)]
    limits = [_limit(m, p, links, trainer_usd_gb, stores, options.same_delta) for m, p in presets.items()]
    published = list(_published(compute, presets))
    if options.json:
        report = {"scenario": "rl_cost", "compute": options.compute.name, "prices": _sources(prices, rows, options)}
        print(json.dumps({**report, "rows": rows, "limits": limits, "published": published}, indent=1))
    else:
        _print(rows, limits, published)
    if options.plot is not None:
        drawn = presets.get(DRAWN) or next(iter(presets.values()))
        _draw(drawn, links, trainer_usd_gb, prices, stores, options)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--compute", type=Path, default=PUBLISHED, help="what models compute (default: published.toml)")
    made.add_argument("--prices", type=Path, default=PRICES, help="price lists (default: those of swarm-node delta)")
    made.add_argument("--model", action="append", help="run of the input file (may be repeated; default all five)")
    made.add_argument("--provider", action="append", help="of all machines, or TRAINER/NODES (may be repeated)")
    made.add_argument("--trainer", default="aws", help="the trainer's provider, in the limits and plots (default aws)")
    made.add_argument("--free-store", default="r2", help="object store of store-free (default r2)")
    made.add_argument("--paid-store", default="s3", help="object store of store-paid (default s3)")
    made.add_argument("--gbit", type=float, default=GBIT, help=f"of every link, each way (default {GBIT})")
    made.add_argument("--regions", type=int, default=4, help="regions of equal size (default 4)")
    made.add_argument("--joins-hour", type=float, default=0.0, help="machines an hour that need the model (default 0)")
    made.add_argument("--bits", type=float, help="bits a changed element of our codec (default: the input file's)")
    made.add_argument("--same-delta", action="store_true", help="all ways send our delta")
    made.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    made.add_argument("--plot", type=png, help=f"draw a PNG, of {DRAWN} or the first model")
    options = made.parse_args(arguments)
    bits = 1.0 if options.bits is None else options.bits
    if not (options.gbit > 0 and options.regions >= 1 and options.joins_hour >= 0 and bits > 0):
        raise UsageError("--gbit and --bits are above 0, --regions is at least 1, --joins-hour at least 0.")
    return options


def _links(compute: Compute, options: argparse.Namespace) -> Links:
    return Links(
        bytes_s=options.gbit * 1e9 / 8,
        regions=options.regions,
        border_copies=compute.wan["border_copies"],
        joins_hour=options.joins_hour,
        object_bytes=compute.store["object_bytes"],
        poll_s=compute.store["poll_s"],
        full_every=compute.store["full_every"],
    )


def _bills(
    preset: Preset,
    links: Links,
    prices: Callable[[Store | None], Prices],
    stores: dict[str, Store],
    same_delta: bool,
) -> dict[str, Bill]:
    """`prices`: where versions go through this object store, if any."""
    nbytes = preset.swarm_bytes if same_delta else None
    return {way: bill(preset, way, links, prices(stores.get(way)), stores.get(way), nbytes) for way in WAYS}


def _rows(
    model: str, preset: Preset, links: Links, prices: PriceList, stores: dict[str, Store], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for pair in options.provider or PROVIDERS:
        trainer, _, nodes = pair.partition("/")
        rates = partial(Prices.of, prices, trainer, nodes or trainer)
        bills = _bills(preset, links, rates, stores, options.same_delta)
        most = cheapest(list(bills.values())).tokens_usd
        yield {
            "model": model,
            "name": preset.name,
            "provider": pair,
            "ways": {way: asdict(each) | {"usd": each.usd} for way, each in bills.items()},
            "cheapest": [way for way, each in bills.items() if each.tokens_usd >= (1 - SAME_SHARE) * most],
        }


# ---------------------------------------------------------------- where each way wins


def _limit(
    model: str, preset: Preset, links: Links, trainer_usd_gb: float, stores: dict[str, Store], same_delta: bool
) -> dict[str, Any]:
    """At which price of the nodes' egress the swarm costs what each other way costs: None if at no price, or at any
    (`same`). `cheaper_when_free`: whether the swarm is the cheaper one where nodes pay nothing."""
    nbytes = preset.swarm_bytes if same_delta else None

    def usd(way: str, node_usd_gb: float) -> float:
        store = stores.get(way)
        return bill(preset, way, links, Prices.flat(trainer_usd_gb, node_usd_gb, store), store, nbytes).usd

    def against(other: str) -> dict[str, Any]:
        def difference(usd_gb: float) -> float:
            return usd("swarm", usd_gb) - usd(other, usd_gb)

        same = max(abs(difference(0.0)), abs(difference(MOST_BREAK_EVEN_USD_GB))) < LEAST_USD
        price = None if same else crossing(difference, MOST_BREAK_EVEN_USD_GB)
        return {"node_usd_gb": price, "same": same, "cheaper_when_free": difference(0.0) < 0}

    others = {way: against(way) for way in WAYS if way != "swarm"}
    return {"model": model, "name": preset.name, "trainer_usd_gb": trainer_usd_gb, "swarm_against": others}


def _published(compute: Compute, presets: dict[str, Preset]) -> Iterator[dict[str, Any]]:
    """The published tokens a dollar, and those that follow from the published tokens/s and dollars an hour."""
    for model, preset in presets.items():
        figures = compute.models[model]
        for kind, tokens_s, usd_hour in (
            ("published", figures.get("published_tokens_s"), figures.get("usd_hour")),
            ("reserved", figures["tokens_s"], figures.get("reserved_usd_hour")),
        ):
            published = figures.get(f"{kind}_tokens_usd")
            if published is not None:
                yield {
                    "model": model,
                    "name": preset.name,
                    "what": "one data centre with RDMA" if kind == "reserved" else "SparrowRL",
                    "published_tokens_usd": published,
                    "tokens_usd": tokens_s * 3600 / usd_hour,
                }
        if preset.equal_tokens_s is not None:
            yield {
                "model": model,
                "name": preset.name,
                "what": "equal shares of unequal nodes, traffic free",
                "published_tokens_usd": None,
                "tokens_usd": preset.equal_tokens_s * 3600 / preset.usd_hour,
            }


def _sources(prices: PriceList, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The prices that were used, with their sources."""
    names = {name for row in rows for name in row["provider"].split("/")} | {options.trainer}
    used: dict[str, Any] = {name: asdict(prices.provider(name)) for name in sorted(names)}
    return used | {name: asdict(prices.store(name)) for name in (options.free_store, options.paid_store)}


# ---------------------------------------------------------------- output


def _print(
    rows: Sequence[dict[str, Any]], limits: Sequence[dict[str, Any]], published: Sequence[dict[str, Any]]
) -> None:
    print("Million tokens a dollar")
    table: list[tuple[str, ...]] = [("model", "provider", *WAYS)]
    for row in rows:
        cells = (
            f"{each['tokens_usd'] / 1e6:.2f}{'*' if way in row['cheapest'] else ' '}"
            for way, each in row["ways"].items()
        )
        table.append((row["name"], row["provider"], *cells))
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print("\nTraffic, dollars a step: all of it with the swarm, and what the trainer pays of that")
    for row in rows:
        swarm = row["ways"]["swarm"]
        traffic = swarm["usd"] - swarm["machine_usd"]
        share = traffic / swarm["usd"]
        print(f"{row['name']}, {row['provider']}: {traffic:.4f} ({share:.1%} of the step), {swarm['trainer_usd']:.4f}")
    print()
    for limit in limits:
        print(f"{limit['name']}, trainer pays ${limit['trainer_usd_gb']:g} a GB: where the swarm is cheaper than")
        for way, found in limit["swarm_against"].items():
            print(f"    {way}: {_words(found)}")
    for row in published:
        beside = "" if row["published_tokens_usd"] is None else f", published {row['published_tokens_usd'] / 1e6:.2f}"
        print(f"{row['name']}, {row['what']}: {row['tokens_usd'] / 1e6:.2f} million tokens a dollar{beside}")


def _words(found: dict[str, Any]) -> str:
    if found["same"]:
        return "the same at any price"
    if found["node_usd_gb"] is None:
        return "at any price" if found["cheaper_when_free"] else "at no price"
    return f"where nodes pay {'less' if found['cheaper_when_free'] else 'more'} than ${found['node_usd_gb']:.3g} a GB"


def _draw(
    preset: Preset,
    links: Links,
    trainer_usd_gb: float,
    prices: PriceList,
    stores: dict[str, Store],
    options: argparse.Namespace,
) -> None:
    """Left: tokens a dollar by what the nodes pay. Right: the cheapest way, by that and the number of nodes, where the
    trainer pays and where it does not; lines say by how many percent the swarm is ahead of the best other way."""

    def bills(run: Preset, trainer: float, usd_gb: float) -> dict[str, Bill]:
        return _bills(run, links, partial(Prices.flat, trainer, usd_gb), stores, options.same_delta)

    with drawing(options.plot, 3, inches=(15, 4.6)) as (lines, paid, free):
        usd_gb = np.linspace(0.0, MOST_USD_GB, 61)
        along = [bills(preset, trainer_usd_gb, float(usd)) for usd in usd_gb]
        for way, color in COLORS.items():
            lines.plot(usd_gb, [each[way].tokens_usd / 1e6 for each in along], color=color, label=way)
        for provider in prices.providers.values():
            lines.axvline(provider.egress_usd_gb.usd, color="black", alpha=0.15, linewidth=1)
        lines.set_xlabel("dollars a GB that a node pays for what it sends\n(gray: providers of the price list)")
        lines.set_ylabel("million tokens a dollar")
        lines.set_ylim(0, 1.35 * max(each.tokens_usd for each in along[0].values()) / 1e6)
        lines.set_title(f"{preset.name}, {preset.nodes} nodes, trainer pays ${trainer_usd_gb:g} a GB", fontsize=9)
        lines.legend(fontsize=8, ncols=2, loc="upper right")
        for axes, trainer in ((paid, trainer_usd_gb), (free, 0.0)):
            grid = [[bills(preset.of_nodes(nodes), trainer, usd) for nodes in NODES] for usd in PRICES_USD_GB]
            _map(axes, grid)
            axes.set_title(f"the cheapest way, where the trainer pays ${trainer:g} a GB", fontsize=9)


def _map(axes: Any, grid: list[list[dict[str, Bill]]]) -> None:
    """One map. `grid`: bills by price (rows) and number of nodes (columns)."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = list(COLORS)
    winner = [[names.index(cheapest(list(each.values())).way) for each in line] for line in grid]
    others = [name for name in names if name != "swarm"]
    ahead = [
        [100 * (each["swarm"].tokens_usd / max(each[way].tokens_usd for way in others) - 1) for each in line]
        for line in grid
    ]
    axes.pcolormesh(
        NODES,
        PRICES_USD_GB,
        winner,
        cmap=ListedColormap(list(COLORS.values())),
        vmin=-0.5,
        vmax=len(names) - 0.5,
        alpha=0.5,
        shading="nearest",
        linewidth=0,
        rasterized=True,
    )
    contours = axes.contour(NODES, PRICES_USD_GB, ahead, levels=LEVELS, colors="black", linewidths=0.7)
    axes.clabel(contours, fmt=lambda level: f"{level:+.0f} %", fontsize=7, inline=False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("nodes (trainer and samples in proportion)\nlines: the swarm beside the best other way")
    axes.set_ylabel("dollars a GB that a node pays")
    shown = sorted({index for line in winner for index in line})
    axes.legend(
        handles=[Patch(color=COLORS[names[index]], alpha=0.5, label=names[index]) for index in shown],
        fontsize=8,
        loc="lower right",
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(str(error))
