"""Colours, bars and figures of the picture."""

import colorsys
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from node.settings.text import printable
from node.settings.units import size_text as size
from node.settings.units import time_text as time
from node.settings.units import version_text as version

__all__ = [
    "bar", "count", "fit", "named", "printable", "share", "size", "slot_style", "sparkline", "time", "title", "version",
]  # fmt: skip

_BARS: Final = " ▁▂▃▄▅▆▇█"
_TRAINER: Final = -1


def slot_style(slot: int) -> str:
    """A member's colour, the same hue as on the page."""
    if slot == _TRAINER:
        return "bold"
    red, green, blue = colorsys.hls_to_rgb((slot * 137.508 + 210) % 360 / 360, 0.6, 0.62)
    return f"rgb({int(255 * red)},{int(255 * green)},{int(255 * blue)})"


def named(name: str, peer: str) -> str:
    """A member's name, or the end of its PeerId."""
    return printable(name or peer[-8:])


def share(value: float | None, digits: int = 0) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def count(value: float | None) -> str:
    """A number with a comma for each thousand."""
    return "-" if value is None else f"{value:,.0f}"


def bar(value: float, whole: float, width: int, mark: float | None = None) -> Text:
    """`value` of `whole` as a bar; `mark`: where a line is drawn on it."""
    filled = 0 if whole <= 0 else round(width * min(1.0, value / whole))
    text = Text("█" * filled + "░" * (width - filled))
    text.stylize("green" if mark is None or value <= mark else "red", 0, filled)
    if mark is not None and 0 < mark <= whole and width:
        at = min(width - 1, round(width * mark / whole))
        text = Text.assemble(text[:at], ("│", "bold"), text[at + 1 :])
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as a line of bars, the highest one full."""
    values = values[-width:]
    top = max(values, default=0.0)
    return "".join(_BARS[round(8 * value / top)] if top > 0 else _BARS[0] for value in values)


def title(text: str, width: int) -> Text:
    """The line above a panel."""
    return Text(f"── {text} ".ljust(width, "─")[:width], "dim")


def fit(line: Text, width: int) -> Text:
    """`line` cut or filled to exactly `width` columns. Characters that move the cursor, in names for example, become
    question marks."""
    line = line.copy()
    line.plain = printable(line.plain)
    line.truncate(width, overflow="ellipsis", pad=True)
    return line
