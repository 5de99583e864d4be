"""Generates the state diagrams of `docs/protocol.md` from the transition tables of the protocol.

    python -m tools.diagrams            writes them into the page
    python -m tools.diagrams --check    exits with 1 if the page differs from the tables

A diagram stands between `<!-- diagram NAME -->` and `<!-- end diagram -->`; the text between them is replaced.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from swarm.protocol.core import standing
from swarm.protocol.transfer import catchup_phases

__all__ = ["DIAGRAMS", "PAGE", "diagram", "fill"]

PAGE: Final = Path(__file__).parents[1] / "docs" / "protocol.md"

DIAGRAMS: Final[Mapping[str, Mapping[Enum, Mapping[Enum, Enum]]]] = {
    "catch-up": catchup_phases.TRANSITIONS,
    "lease": standing.TRANSITIONS,
}
"""By the name in the page: for each state, the next state by cause."""

_PLACE: Final = re.compile(r"(<!-- diagram (?P<name>\S+) -->\n).*?(<!-- end diagram -->)", re.DOTALL)


def diagram(table: Mapping[Enum, Mapping[Enum, Enum]]) -> str:
    """Return a mermaid state diagram. The first state of the table is the initial one.

    A cause that leads to the same state from every state is drawn once, from a state `any`.
    """
    from_any = dict.fromkeys(
        (cause, after) for cause, after in next(iter(table.values())).items()
        if all(causes.get(cause) is after for causes in table.values())
    )  # fmt: skip
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table)).value}"]
    lines += [f"    any --> {after.value}: {cause.value}" for cause, after in from_any]
    for before, causes in table.items():
        for cause, after in causes.items():
            if (cause, after) not in from_any:
                lines.append(f"    {before.value} --> {after.value}: {cause.value}")
    return "\n".join(lines)


def fill(page: str) -> str:
    """Return `page` with its diagrams regenerated. Raises `KeyError` for a diagram without a table."""

    def render(found: re.Match[str]) -> str:
        return f"{found[1]}```mermaid\n{diagram(DIAGRAMS[found['name']])}\n```\n{found[3]}"

    return _PLACE.sub(render, page)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not current")
    check = parser.parse_args().check
    before = PAGE.read_text()
    after = fill(before)
    if check and after != before:
        sys.exit(f"{PAGE.name} does not show the tables as they are: run python -m tools.diagrams.")
    if after != before:
        PAGE.write_text(after)


if __name__ == "__main__":
    _main()
