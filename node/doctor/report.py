"""The doctor's lines as text for people and as JSON for programs. Pure."""

import textwrap
from typing import Any, Final

from node.doctor.lines import Line
from node.doctor.rules import useful
from node.settings.text import printable

__all__ = ["as_json", "as_text"]

_SIGNS: Final = {"ok": "ok", "costs": "costs", "stops": "STOPS", "skipped": "-"}
_INDENT: Final = " " * 28
"""The width of the two columns before the findings."""


def as_text(lines: dict[str, Line], columns: int) -> str:
    """One paragraph a check, and the outcome in the last line."""
    out: list[str] = []
    for name, line in lines.items():
        head = f"{_SIGNS[line.verdict]:<6} {name:<21}"
        out += _wrapped(head, line.found, columns)
        if line.costs:
            out += _wrapped(_INDENT, f"costs: {line.costs}", columns)
        if line.mend:
            out += _wrapped(_INDENT, f"mend:  {line.mend}", columns)
    return "\n".join([*out, "", *textwrap.wrap(_outcome(lines), max(40, columns))])


def as_json(lines: dict[str, Line]) -> dict[str, Any]:
    """For programs; the keys are stable."""
    return {
        "useful": useful(lines),
        "checks": [
            {"check": name, "verdict": line.verdict, "found": line.found, "costs": line.costs, "mend": line.mend}
            for name, line in lines.items()
        ],
    }


def _wrapped(head: str, text: str, columns: int) -> list[str]:
    """Names and reasons come from other machines, and must not control a terminal."""
    width = max(40, columns)
    wrapped = textwrap.wrap(
        printable(text), width, initial_indent=head, subsequent_indent=_INDENT,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return wrapped or [head.rstrip()]


def _outcome(lines: dict[str, Line]) -> str:
    stopping = [name for name, line in lines.items() if line.verdict == "stops"]
    costing = [name for name, line in lines.items() if line.verdict == "costs"]
    if stopping:
        return f"This machine is not useful yet: {', '.join(stopping)}. Mend the first, then run this again."
    if costing:
        return f"This machine is useful. It would be more so without: {', '.join(costing)}."
    return "This machine is useful."
