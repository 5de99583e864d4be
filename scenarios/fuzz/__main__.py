"""Typed fuzzing: gives readers valid, signed messages in which one field (sometimes two) has an extreme value.

    python -m scenarios.fuzz TARGET [--cases 1000000] [--seed 1] [--seconds 60] [--table]
    python -m scenarios.fuzz --list
    python -m scenarios.fuzz --replay 'TARGET:SEED:CASE'

TARGET is one or more of the names that --list prints, or `all`; --seconds is the time for all of them together. An
escape is an exception that no caller expects, a table that grows without bound, or harm to an honest peer. At the first
escape the command prints it with its message and exits with 1. With --strict it also exits with 1 when a message took
more than 50 ms of CPU time.
"""

import argparse
import logging
import sys
import time

from scenarios.fuzz.run import Result, fuzz, lines, replay
from scenarios.fuzz.targets import TARGETS, target_of

__all__ = ["main"]


def _say(result: Result) -> None:
    print(f"  {result.target}: {result.cases:,} cases, {result.rate:,.0f} a CPU second", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--cases", type=int, default=1_000_000, help="cases per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all targets together")
    parser.add_argument("--start", type=int, default=0, help="number of the first case, to split a long run")
    parser.add_argument("--escapes", type=int, default=1, help="stop after this many escapes")
    parser.add_argument("--signatures", action="store_true", help="use real signatures: a fifth of the speed")
    parser.add_argument("--table", action="store_true", help="print the outcomes of each field")
    parser.add_argument("--strict", action="store_true", help="fail when a message took over 50 ms")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--replay", metavar="TARGET:SEED:CASE", help="reproduce an escape")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # logs about hostile input are not checked here
    if options.list:
        for name in TARGETS:
            print(f"{name:<12} {target_of(name).about}")
        return 0
    if options.replay:
        name, _, rest = options.replay.partition(":")
        escape = replay(target_of(name), rest)
        print(escape.error + "\n" + escape.trace if escape else "nothing escapes")
        return 1 if escape else 0
    names = list(TARGETS) if options.targets in ([], ["all"]) else options.targets
    left, failed = options.seconds, False
    for i, name in enumerate(names):
        began = time.monotonic()
        target = target_of(name)
        share = left / (len(names) - i)
        result = fuzz(
            target,
            cases=options.cases,
            seed=options.seed,
            seconds=share,
            start=options.start,
            most_escapes=options.escapes,
            signatures=options.signatures,
            say=_say,
        )
        left -= time.monotonic() - began
        print("\n".join(lines(result, table=options.table)), flush=True)
        failed |= result.escape is not None or (options.strict and bool(result.slow))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
