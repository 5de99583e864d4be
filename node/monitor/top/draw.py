"""The whole picture: a headline, what is wrong, the panels that fit, and a legend. Pure."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rich.text import Text

from node.monitor.monitor import Seen
from node.monitor.top import panels
from node.monitor.top.style import fit, title
from node.status.schema import SeedStatus

__all__ = ["WIDE", "Picture", "draw"]

WIDE: Final = 120
"""From this many columns on, panels stand side by side."""
LEAST: Final = (40, 10)
"""Columns and rows below which nothing can be shown."""
_MEMBER_ROWS: Final = 6
"""Lines that the members' panel gets at least, with its title and header."""
_KEYS: Final = "q: end   ↑ ↓: members   ← →: stripe"
_COLOURS: Final = (
    ("green", "holds the newest version"), ("yellow", "behind, or slower than it could be"), ("red", "wrong"),
)  # fmt: skip
_AXIS: Final = "e encoded, f first node, h half, l last"


class Picture(NamedTuple):
    """What to draw, and how large."""

    seen: Seen
    columns: int
    rows: int
    clock: str
    """The time of day."""
    rates: Sequence[float] = ()
    """Tokens/s of the last looks, the newest last."""
    scroll: int = 0
    """The first member that is shown."""
    stripe: int = 0


class _Panel(NamedTuple):
    """`lines(height)` gives at most that many; `least`: below this height the panel is left out."""

    name: str
    lines: Callable[[int], list[Text]]
    least: int
    most: int


def draw(picture: Picture) -> list[Text]:
    """`picture.rows` lines of `picture.columns` columns each."""
    width, rows, seen = picture.columns, picture.rows, picture.seen
    if width < LEAST[0] or rows < LEAST[1]:
        return _filled([Text("Too small: enlarge it, or press q.")], width, rows)
    top = _heading(picture)
    bottom = _legend(width)
    room = rows - len(top) - len(bottom)
    middle: list[Text] = []
    if isinstance(seen.status, SeedStatus):
        middle = _seed(seen.status, picture, width, room)
    elif seen.status is not None:
        status = seen.status
        middle = _stack([
            _Panel("This machine", lambda most: panels.own(status, width)[:most], 3, 12),
            _Panel("The newest version", lambda most: panels.pieces(status, width, most), 4, 6),
            _Panel("Who sends to whom", lambda most: panels.trees(status, width, most, picture.stripe), 3, 99),
        ], width, room)  # fmt: skip
    return _filled(top + middle, width, rows - len(bottom)) + bottom


def _filled(lines: list[Text], width: int, rows: int) -> list[Text]:
    lines = [fit(line, width) for line in lines[:rows]]
    return lines + [Text(" " * width)] * (rows - len(lines))


def _heading(picture: Picture) -> list[Text]:
    seen, width = picture.seen, picture.columns
    role = "" if seen.status is None else type(seen.status).__struct_config__.tag
    corner = Text(f" {role} {picture.clock}", "dim")
    line = fit(Text(seen.headline, "bold"), width - corner.cell_len)
    lines = [line + corner]
    if seen.away:
        lines += [fit(Text(f"It does not answer now; this was its state before. {seen.away}", "bold red"), width)]
    shown = max(1, picture.rows // 10)
    for finding in seen.findings[:shown]:
        text = Text.assemble(("! ", "bold yellow"), finding.what)
        text.append(f"  {finding.todo}", "dim")
        lines.append(fit(text, width))
    if (more := len(seen.findings) - shown) > 0:
        lines.append(Text(f"! and {more} more: swarm-node page shows all of them", "yellow"))
    return lines


def _legend(width: int) -> list[Text]:
    colours = Text()
    for style, meaning in _COLOURS:
        colours.append("■ ", style).append(f"{meaning}   ", "dim")
    if width >= WIDE:
        return [fit(Text.assemble((f"{_KEYS}   ", "bold"), colours, (f"axis: {_AXIS}", "dim")), width)]
    return [fit(Text(_KEYS, "bold"), width), fit(colours, width)]


def _seed(status: SeedStatus, picture: Picture, width: int, room: int) -> list[Text]:
    def wide(each: int) -> tuple[list[_Panel], list[_Panel]]:
        return (
            [
                _Panel("The newest version", lambda most: panels.pieces(status, each, most), 4, 6),
                _Panel("What the trainer sends", lambda most: panels.egress(status, each)[:most], 1, 2),
                _Panel("Who sends to whom", lambda most: panels.trees(status, each, most, picture.stripe), 3, 99),
            ],
            [
                _Panel("Work", lambda most: panels.work(status, each, picture.rates)[:most], 1, 5),
                _Panel("Versions", lambda most: panels.versions(status.steps, each, most - 1), 3, 99),
            ],
        )

    at_members = min(len(status.nodes) + 3, max(_MEMBER_ROWS, 2 * room // 5))
    if width < WIDE:
        left, right = wide(width)
        pieces, egress, drawn = left
        few = right[0]._replace(most=3), right[1]._replace(most=4 if room < 40 else 9)
        stack = [*few, pieces._replace(most=4), egress, drawn]
        above = _stack(stack, width, room - at_members)
    else:
        each = (width - 2) // 2
        columns = [_stack(part, each, room - at_members) for part in wide(each)]
        height = max(map(len, columns))
        both = [_filled(column, each, height) for column in columns]
        above = [one + Text("  ") + other for one, other in zip(*both, strict=True)]
    lines = panels.members(status, width, room - len(above) - 1, picture.scroll)
    return [*above, title(f"Members: {len(status.nodes)}", width), *lines]


def _stack(stack: Sequence[_Panel], width: int, room: int) -> list[Text]:
    """The panels that fit, one below the other. The first ones get their place first."""
    lines: list[Text] = []
    left = room
    for panel in stack:
        if left < panel.least + 1:
            continue
        found = panel.lines(min(panel.most, left - 1))
        lines += [title(panel.name, width), *found]
        left = room - len(lines)
    return lines
