"""Plots of scenarios, saved as PNG files without a display."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from node.settings.extras import how_to_get, lacking

__all__ = ["drawing", "png"]


def png(text: str) -> Path:
    """The `type` of a command-line argument that names a plot file.

    Raises `ArgumentTypeError`, before any measurement, when matplotlib is missing or the file could not be written.
    """
    path = Path(text)
    if lacking(("matplotlib",)):
        raise argparse.ArgumentTypeError(f"plots need matplotlib: {how_to_get('scenarios')}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file in a folder that exists")
    return path


@contextmanager
def drawing(path: Path, columns: int = 1, *, inches: tuple[float, float], **shared: Any) -> Iterator[Any]:
    """Matplotlib's axes, or an array of them when `columns` is above 1; the figure is saved when the block ends.

    `inches` is (width, height). `shared` is passed on to `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="tight")
    yield figure.subplots(1, columns, **shared)
    figure.savefig(path, format="png", dpi=120)
