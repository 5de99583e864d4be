"""A step over one, three and six regions: how many copies cross into each region, and what distance costs.

    python -m scenarios.sim.regions --nodes 64 --seeds 3 --plot regions.png

*entered* lists, for each region, how many copies of the payload came into it from other regions; the trainer's region
is first. *crossings* is the largest of these numbers, without the trainer's region. Exits with 1 if any node lacks the
version at the end.
"""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from scenarios.harness.plot import png
from scenarios.sim.crowd import REGIONS, Step, gather, step
from scenarios.sim.rows import STEP, crowd_of, draw_ratios, missed, parser, row_of, show, verdict

__all__ = ["entered", "main"]


def entered(steps: Sequence[Step]) -> dict[str, float]:
    """Map each region to the median, over the steps, of the copies that came into it from other regions."""
    return {region: median(step.entered[region] for step in steps) for region in steps[0].entered}


def _cell(row: dict[str, Any]) -> str:
    return " ".join(f"{copies:.2f}" for copies in row["entered"].values())


COLUMNS: Final = {**STEP, "entered": _cell}


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--nodes", type=int, default=64)
    options_parser.add_argument("--plot", type=png, help="draw a PNG")
    options = options_parser.parse_args(arguments)
    payload, seeds = int(options.mib * 2**20), range(options.seed, options.seed + options.seeds)
    rows = []
    for regions in (1, 3, 6):
        crowd = crowd_of(options, options.nodes, regions=regions)
        steps = [step(gather(crowd, seed), payload) for seed in seeds]
        rows.append(row_of(f"{regions} regions", steps, round_trip_s=crowd.round_trip_s, entered=entered(steps)))
    show("regions", rows, as_json=options.json, columns=COLUMNS)
    if not options.json:
        print(f"entered: {', '.join(REGIONS)}")
    if options.plot is not None:
        draw_ratios("regions", rows, options.plot)
    return verdict("regions", missed(rows))


if __name__ == "__main__":
    sys.exit(main())
