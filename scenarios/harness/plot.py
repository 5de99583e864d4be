"""How scenarios draw: a figure without a display, saved as a PNG."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.settings.extras import how_to_get, lacking

__all__ = ["drawing", "png"]


def png(text: str) -> Path:
    """The path of a plot, as an argument. Refused before anything is measured if it could not be drawn there."""
    path = Path(text)
    if lacking(("matplotlib",)):
        raise argparse.ArgumentTypeError(f"plots need matplotlib: {how_to_get('scenarios')}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file in a folder that exists")
    return path


@contextmanager
def drawing(path: Path, columns: int = 1, *, inches: tuple[float, float], **shared: Any) -> Iterator[Any]:
    """Matplotlib's axes to draw on, or a row of them; saved at the end. `shared`: what `Figure.subplots` takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="tight")
    yield figure.subplots(1, columns, **shared)
    figure.savefig(path, format="png", dpi=120)
