"""`swarm-node`: parses the command line, calls the command, and turns an error into a sentence and an exit code.

    0  done       1  failed       2  usage: the user can correct it     3  cannot reach a peer or process
    130 SIGINT    143 SIGTERM (0 for a node with --finish-within that has finished its work)

Each command imports what it needs when it runs, so that `--help` answers at once and needs neither torch nor libp2p.
"""

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from inspect import iscoroutinefunction
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from cyclopts import App, CycloptsError, Parameter

from codec.errors import SwarmError, UsageError
from node.cli import (
    authority,
    completion,
    config,
    doctor,
    kept,
    member,
    removal,
    replay,
    saved,
    sleep,
    standby,
    watch,
    weights,
    work,
)
from node.cli.hidden import hide
from node.cli.report import SEE
from node.settings.config import KEPT
from node.settings.sources import sources

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

__all__ = ["app", "main", "run"]

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
INTERRUPTED: Final = 130


def _flowing(console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
    """Draw a panel of the help with its texts as paragraphs: they are docstrings, wrapped and indented for the code."""
    from cyclopts.help import DefaultFormatter
    from rich.text import Text

    panel.entries = [entry.copy(default=_as_typed(entry.default)) for entry in panel.entries]
    for entry in panel.entries:
        text = getattr(entry.description, "primary_renderable", None)
        if isinstance(text, Text):
            text.plain = " ".join(text.plain.split())
    DefaultFormatter()(console, options, panel)


def _as_typed(default: str | None) -> str | None:
    """A default as a person would type it; None where it is empty."""
    if default in ("()", '""', "''"):
        return None
    found = re.fullmatch(r"\('([^']*)',\)", default or "")
    return found[1] if found else default


app = App(
    name="swarm-node",
    help="Move a policy's weights from one trainer to any number of rollout nodes, as signed deltas, peer to peer.",
    help_format="plaintext",
    help_formatter=_flowing,
    help_epilogue="""Begin with:

  swarm-node delta OLD NEW          what would my training steps cost?
  swarm-node demo                   a whole swarm on this machine
  swarm-node seed --base FOLDER     on the trainer's machine; then swarm-node invite
  swarm-node doctor TICKET          will this machine be useful? what is wrong with it?
  swarm-node join TICKET            on each rollout machine

Settings also come from SWARM_* variables and swarm.toml: swarm-node config init, config show
Exit codes: 0 done, 1 failed, 2 usage, 3 cannot reach. --debug shows tracebacks.""",
    version=watch.version,
    default_parameter=Parameter(negative=()),
    config=sources(),
    backend="trio",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    error_formatter=lambda error: f"swarm-node: {error}",
)
for commands in (
    *(weights, authority, removal, work, replay, standby, kept, saved),
    *(member, sleep, doctor, watch, config, completion),
):
    commands.register(app)
for flag in ("--help", "--version"):
    app[flag].group = SEE


def main() -> None:
    """The console script."""
    hide()  # before anything is done: until then other users of this machine can read what was typed
    words = sys.argv[1:]
    if words and words[0] in app and iscoroutinefunction(app[words[0]].default_command):
        # Such a command waits for signals itself as soon as it works. Until then it imports, where a KeyboardInterrupt
        # may be lost (Python's import system ignores one that is raised in its callbacks): the signal itself ends it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(run(words))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code. Prints a sentence for any error; a traceback only with --debug or
    SWARM_DEBUG."""
    words = list(arguments)
    debug = "--debug" in words or bool(os.environ.get("SWARM_DEBUG"))
    # The parser takes a lone dash for an option.
    words = ["--ticket-file=-" if word == "-" else word for word in words if word != "--debug"]
    if words[:1] == ["demo"]:  # --keep had no value in earlier releases
        words = [
            f"--keep={KEPT}" if word == "--keep" and following.startswith("-") else word
            for word, following in pairwise([*words, "-"])
        ]
    try:
        result = app(words, exit_on_error=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except CycloptsError:  # already printed
        command = next((word for word in words if not word.startswith("-") and word in app), "")
        print(f"See swarm-node {command} --help".replace("  ", " "), file=sys.stderr)
        return USAGE
    except BaseException as error:  # the one place of the command line that catches everything
        if isinstance(error, SystemExit | GeneratorExit):
            raise
        if debug:
            traceback.print_exception(error)
        text, code = explain(error)
        if text:
            print(f"swarm-node: {text}", file=sys.stderr)
            if (logs := sys.modules.get("node.settings.logs")) is not None:  # not imported: nothing was logged
                logs.note_end(text)
        return code


def explain(error: BaseException) -> tuple[str, int]:
    """The sentence for `error` ("" when the user knows already), and the exit code."""
    leaves = list(_leaves(error))
    # Of several errors at once, report the one that the user can act on.
    for leaf in leaves:
        if isinstance(leaf, UsageError):
            return str(leaf), USAGE
    for leaf in leaves:
        if isinstance(leaf, KeyboardInterrupt):
            return "", INTERRUPTED
        if _is(leaf, "node.cli.lifetime", "Interrupted"):
            return "", leaf.args[1]
        if isinstance(leaf, BrokenPipeError) and leaf.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python's own flush at exit stays quiet
            return "", FAILED
    for leaf in leaves:
        if isinstance(leaf, SwarmError):
            return str(leaf), UNREACHABLE if _is(leaf, "swarm.transport.base", "Unreachable") else FAILED
        if isinstance(leaf, OSError) and (text := _explain_os(leaf)):
            return text, FAILED
    first = leaves[0]
    text = f"{type(first).__name__}: {first}" if str(first) else type(first).__name__
    return f"unexpected {text}. This is a bug; run the command with --debug for the traceback.", FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is(error: BaseException, module: str, name: str) -> bool:
    """Whether `error` is of that class. Does not import the module: one that is not imported has raised nothing."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(error, getattr(loaded, name))


def _explain_os(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"No room left on the disk{where}. Free some space, or choose another folder with --home."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and where:
        return f"Not allowed to use{where} ({error.strerror}). Change its mode, or choose another folder with --home."
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) and where:
        return f"{error.strerror}:{where}."
    return ""


if __name__ == "__main__":
    main()
