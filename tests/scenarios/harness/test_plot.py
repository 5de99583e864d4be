"""Plots are PNG files; a plot that cannot be saved is refused before the measurement."""

import argparse
from pathlib import Path

import pytest

from scenarios.harness.plot import drawing, png


def test_a_plot_is_a_png_whatever_its_name(tmp_path: Path) -> None:
    path = png(str(tmp_path / "drawn"))
    with drawing(path, 2, inches=(4, 2), sharey=True) as (left, right):
        left.plot([0, 1], [1, 2])
        right.plot([0, 1], [3, 4])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert left.get_ylim() == right.get_ylim()


@pytest.mark.parametrize("where", ["absent/plot.png", ""])
def test_a_plot_that_cannot_be_saved_is_refused_at_once(tmp_path: Path, where: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no file in a folder that exists"):
        png(str(tmp_path / where))


def test_without_matplotlib_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.settings.extras.find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match=r"EXTRAS=scenarios|pip install"):
        png(str(tmp_path / "plot.png"))
