"""`python -m scenarios.hunt [--seed N] [--runs N] [--steps N] [--time S] [--chunk-bytes N] [--up-gb-day X]
[--schedule FILE] [--keep FILE] [--go-on FOLDER] [--json]`.

`scenarios.hunt.command` has all flags.
"""

import sys

from scenarios.hunt.hashes import with_fixed_hashes

__all__: list[str] = []

if __name__ == "__main__":
    with_fixed_hashes("scenarios.hunt")
    from scenarios.hunt.command import main

    sys.exit(main(sys.argv[1:]))
