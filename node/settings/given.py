"""Secrets that a person hands to a command: a ticket or an API key, by argument, file, standard input or variable."""

import getpass
import os
import sys
from pathlib import Path
from typing import Final, TextIO

from codec.errors import UsageError

__all__ = ["api_key", "secret_file", "ticket_text"]

_STDIN: Final = "-"
_MAX_CHARS: Final = 16_384
"""Twice what the longest ticket has, in lines of any length; what is longer is no secret of ours."""


def ticket_text(argument: str, file: Path | None, stdin: TextIO | None = None) -> str:
    """The text of the ticket: TICKET or --ticket-file (both are an error), else SWARM_TICKET. A file named "-" is
    standard input: `join -` is `join --ticket-file=-`.

    `argument` is as the parser has it, which puts the variable there if nothing was typed. The variable is taken out of
    the environment, so that engines do not inherit it. Raises `UsageError`.
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
    """The gateway's key: --api-key or --api-key-file (both are an error), else SWARM_API_KEY, which is in `typed` too
    and is taken out of the environment. Raises `UsageError`."""
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
    """What is written in the file that `flag` names, without white space around it. Raises `UsageError`."""
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{flag}: {path} cannot be read ({why}).") from error
    if len(text) > _MAX_CHARS:
        raise UsageError(f"{flag}: {path} is far too long.")
    return text.strip()


def _from_stdin(stdin: TextIO) -> str:
    """A ticket from standard input; a person at a terminal is asked, and what is typed or pasted is not shown."""
    try:
        text = getpass.getpass("Ticket: ", sys.stderr) if stdin.isatty() else stdin.read(_MAX_CHARS + 1)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError("No ticket came on standard input.") from error
    if not text.strip():
        raise UsageError("No ticket came on standard input.")
    return text
