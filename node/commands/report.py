"""What every reporting command prints: JSON for programs, lines for people, on stdout and nothing else there."""

import json
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter

__all__ = ["LEND", "SEE", "TRAIN", "TRY", "AsJson", "examples", "print_json"]

AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON for programs instead of lines for people.")]


TRY: Final = Group.create_ordered("Try it")
TRAIN: Final = Group.create_ordered("On the trainer's machine")
LEND: Final = Group.create_ordered("On each rollout machine")
SEE: Final = Group.create_ordered("See what goes on")


def print_json(value: Any) -> None:
    """`value` on stdout, indented; keys keep their order."""
    print(json.dumps(value, indent=2, default=str))


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(["Examples:", "", *(f"  {line}" for line in lines)])
