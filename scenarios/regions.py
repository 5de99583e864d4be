"""A step over one, three and six regions: how often each border is crossed, and what distance costs.

python -m scenarios.regions --nodes 64 --seeds 3 --plot regions.png
"""

import sys

from scenarios.crowd import gather, step
from scenarios.plot import png
from scenarios.rows import crowd_of, parser, row_of, show

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, default=64)
    made.add_argument("--plot", type=png, help="draw a PNG")
    options = made.parse_args(arguments)
    payload, seeds = int(options.mib * 2**20), range(options.seed, options.seed + options.seeds)
    rows = []
    for regions in (1, 3, 6):
        crowd = crowd_of(options, options.nodes, regions=regions)
        steps = [step(gather(crowd, seed), payload) for seed in seeds]
        rows.append(row_of(f"{regions} regions", steps, round_trip_s=crowd.round_trip_s))
    show("regions", rows, as_json=options.json, plot=options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
