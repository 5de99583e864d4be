"""What every command has: its place and examples in the help, and how it reports: JSON for programs, lines for people,
on stdout and nothing else there."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Final

from cyclopts import App, Group, Parameter

__all__ = ["LEND", "SEE", "TRAIN", "TRY", "AsJson", "offer", "print_json"]

AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON for programs instead of lines for people.")]


TRY: Final = Group.create_ordered("Try it")
TRAIN: Final = Group.create_ordered("On the trainer's machine")
LEND: Final = Group.create_ordered("On each rollout machine")
SEE: Final = Group.create_ordered("See what goes on")


def print_json(value: Any) -> None:
    """`value` on stdout, indented; keys keep their order."""
    print(json.dumps(value, indent=2, default=str))


def offer(app: App, command: Callable[..., Any], group: Group | None, *examples: str) -> None:
    """Take `command` into `app`; the examples stand at the end of its help."""
    epilogue = "\n".join(["Examples:", "", *(f"  {line}" for line in examples)])
    app.command(command, group=group, help_epilogue=epilogue)
