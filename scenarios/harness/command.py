"""What the command lines of scenarios share."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from codec.errors import UsageError

__all__ = ["json_parser", "report_rows", "run_as_program"]


def json_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring as it stands, with the option `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def report_rows(
    name: str,
    rows: Sequence[dict[str, Any]],
    options: argparse.Namespace,
    print_table: Callable[[Sequence[dict[str, Any]]], None],
    draw: Callable[[Sequence[dict[str, Any]], Path], None],
) -> int:
    """Print the rows as `options.json` says, draw them into `options.plot`; returns 1 if one has `failed`."""
    if options.json:
        print(json.dumps({"scenario": name, "rows": rows}, indent=1))
    else:
        print_table(rows)
    if options.plot is not None:
        draw(rows, options.plot)
    return 1 if any("failed" in row for row in rows) else 0


def run_as_program(main: Callable[[], int]) -> None:
    """End this process with the exit code that `main` returns; with 2 and the error's text after a `UsageError`.

    SIGTERM does what Ctrl-C does: the processes that `main` has started are ended.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        code = main()
    except UsageError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)
