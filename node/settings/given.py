"""Secrets that a user hands to a command: a ticket or an API key, by argument, file, standard input or variable."""

import getpass
import os
import sys
from pathlib import Path
from typing import Final, TextIO

from codec.errors import UsageError

__all__ = ["api_key", "secret_file", "ticket_text"]

_STDIN: Final = "-"
_MAX_CHARS: Final = 16_384
"""Room for the longest ticket with line breaks; a longer file holds neither a ticket nor a key."""


def ticket_text(argument: str, file: Path | None, stdin: TextIO | None = None) -> str:
    """The text of the ticket: from TICKET or --ticket-file (both are an error), else from SWARM_TICKET.

    A file named "-" is standard input: `join -` is `join --ticket-file=-`. `argument` comes from the parser, which
    fills it from the variable if nothing was typed. The variable is removed from the environment, so that engines do
    not inherit it. Raises `UsageError`.
    """
    variable = os.environ.pop("SWARM_TICKET", "")
    typed = argument if argument != variable else ""
    if typed and file is not None:
        raise UsageError("A ticket was given twice: as an argument, and by - or --ticket-file. Leave one of them out.")
    if file is not None:
        return _from_stdin(stdin or sys.stdin) if str(file) == _STDIN else secret_file(file, "--ticket-file")
    if not (typed or variable):
        raise UsageError(
            "Which swarm? Give the ticket that swarm-node invite printed: as an argument, with - on standard input, "
            "with --ticket-file FILE, or in SWARM_TICKET."
        )
    return typed or variable


def api_key(typed: str, file: Path | None) -> str:
    """The gateway's key: from --api-key or --api-key-file (both are an error), else from SWARM_API_KEY.

    The parser fills `typed` from the variable too, which is removed from the environment. Raises `UsageError`.
    """
    variable = os.environ.pop("SWARM_API_KEY", "")
    if file is None:
        return typed
    if typed and typed != variable:
        raise UsageError("The key was given twice: by --api-key, and by --api-key-file. Leave one of them out.")
    key = secret_file(file, "--api-key-file")
    if not key:
        raise UsageError(f"{file} is empty: --api-key-file needs a key.")
    return key


def secret_file(path: Path, flag: str) -> str:
    """The contents of the file that `flag` names, without surrounding white space. Raises `UsageError`."""
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{flag}: {path} cannot be read ({why}).") from error
    if len(text) > _MAX_CHARS:
        raise UsageError(f"{flag}: {path} is far too long.")
    return text.strip()


def _from_stdin(stdin: TextIO) -> str:
    """A ticket from standard input. At a terminal there is a prompt, and the input is not shown."""
    try:
        text = getpass.getpass("Ticket: ", sys.stderr) if stdin.isatty() else stdin.read(_MAX_CHARS + 1)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError("No ticket came on standard input.") from error
    if not text.strip():
        raise UsageError("No ticket came on standard input.")
    return text
