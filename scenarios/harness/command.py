"""What the command lines of scenarios share."""

import argparse
import sys
from collections.abc import Callable

from codec.errors import UsageError

__all__ = ["json_parser", "run_as_program"]


def json_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring as it stands, with the option `--json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def run_as_program(main: Callable[[], int]) -> None:
    """End this process with the exit code that `main` returns; with 2 and the error's text after a `UsageError`."""
    try:
        code = main()
    except UsageError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)
