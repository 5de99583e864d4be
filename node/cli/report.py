"""What every command shares: its place and examples in the help, and how it reports.

The result goes to stdout, as JSON for programs or lines for people; everything else goes to stderr.
"""

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, Final

from cyclopts import App, Group, Parameter

__all__ = ["LEND", "SEE", "TRAIN", "TRY", "AsJson", "offer", "print_json"]

AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON for programs instead of lines for people.")]


TRY: Final = Group.create_ordered("Try it")
TRAIN: Final = Group.create_ordered("On the trainer's machine")
LEND: Final = Group.create_ordered("On each rollout machine")
SEE: Final = Group.create_ordered("Status and settings")


def print_json(value: Any) -> None:
    """`value` on stdout, indented; keys keep their order."""
    print(json.dumps(value, indent=2, default=str))


def offer(app: App, command: Callable[..., Any], group: Group | None, *examples: str) -> None:
    """Register `command` with `app`; its help ends with the examples."""
    epilogue = "\n".join(["Examples:", "", *(f"  {line}" for line in examples)])
    app.command(command, group=group, help=_description(command), help_epilogue=epilogue)


def _description(command: Callable[..., Any]) -> str:
    """The docstring up to its list of parameters, each paragraph on one line: a terminal wraps it by its own width."""
    text = (inspect.getdoc(command) or "").partition("\n\nParameters\n")[0]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
