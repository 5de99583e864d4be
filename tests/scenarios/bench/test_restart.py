"""The restart benchmark, which itself checks that the restored model is the same and undamaged."""

from pathlib import Path

import pytest

from scenarios.bench.restart import measure


@pytest.mark.parametrize("cold", [False, True])
def test_restart(tmp_path: Path, cold: bool) -> None:
    found = measure(tmp_path, 1 << 20, 1, cold=cold)
    assert [(row["place"], row["after"]) for row in found["rows"]] == [
        ("ram", "clean"), ("ram", "kill"), ("disk", "clean"), ("disk", "kill"),
    ]  # fmt: skip
