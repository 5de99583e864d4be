"""Keeps secrets out of the list of processes, which every user of a machine can read.

A ticket or an API key that was typed as an argument stays in `/proc/PID/cmdline` for as long as the process lives. So a
command that finds one there executes itself again at once, in the same process (`execve` keeps its id), with a
placeholder in place of that argument and the secret in an environment variable, which only the same user can read. The
new program removes the variable from its environment before anything else, so no child process inherits it.

The secret is visible until then, for a third of a second. `join -`, `--ticket-file` and `SWARM_TICKET` never show it.
"""

import json
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from typing import Final

__all__ = ["PLACEHOLDER", "hidden_words", "hide", "restore"]

PLACEHOLDER: Final = "[hidden]"
"""What the list of processes shows instead of a secret."""
_VARIABLE: Final = "_SWARM_NODE_HIDDEN"
"""It does not begin with SWARM_, so that no setting is ever read from it."""
_TICKET: Final = re.compile(r"[\s'\"]*swarm\d[a-z2-7]{32}", re.IGNORECASE)
"""How a ticket begins; a shorter word is of no use to a thief."""
_SECRET_FLAG: Final = "--api-key"


def hidden_words(words: Sequence[str]) -> dict[int, str]:
    """The secrets among the words of a command line, by index; `--api-key=KEY` as a whole word."""
    found: dict[int, str] = {}
    for at, word in enumerate(words):
        follows_flag = at > 0 and words[at - 1] == _SECRET_FLAG
        if word and (follows_flag or _TICKET.match(word) or word.startswith(f"{_SECRET_FLAG}=")):
            found[at] = word
    return found


def hide() -> None:
    """Execute this program again if its command line shows a secret; restore what an earlier call hid.

    Only for the console script, before it does anything else. If the interpreter does not know its own command line, or
    the system refuses, the command goes on as it is.
    """
    if restore(sys.argv, os.environ):
        return
    words, started_with = sys.argv[1:], list(sys.orig_argv)
    found = hidden_words(words)
    if not found or not sys.executable or started_with[len(started_with) - len(words) :] != words:
        return
    first = len(started_with) - len(words)
    for at, word in found.items():
        flag = f"{_SECRET_FLAG}=" if word.startswith(f"{_SECRET_FLAG}=") else ""
        started_with[first + at] = flag + PLACEHOLDER
    started_with[0] = sys.executable
    environment = os.environ | {_VARIABLE: json.dumps({at + 1: word for at, word in found.items()})}
    try:
        os.execve(sys.executable, started_with, environment)
    except OSError:
        return


def restore(argv: list[str], environment: MutableMapping[str, str]) -> bool:
    """Move the secrets that `hide` put into `environment` back into `argv`. Returns whether there were any."""
    text = environment.pop(_VARIABLE, None)
    if text is None:
        return False
    for at, word in json.loads(text).items():
        argv[int(at)] = word
    return True
