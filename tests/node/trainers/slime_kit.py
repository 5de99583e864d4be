"""What the tests of slime and miles share: their code from a clone, the engine that they ask, what both must reach."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from published_kit import check_live


def checked_out(clone: str, commit: str, package: str, folder: Path) -> Path:
    """`folder`, with the folder `package` of a repository as it was at `commit`."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit, package], cwd=clone, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    return folder


@contextmanager
def engine(gateway: str) -> Iterator[str]:
    """The URL of a `node.trainers.slime_engine`."""
    words = ["-m", "node.trainers.slime_engine", "--gateway", gateway, "--at", "127.0.0.1:0", "--gpus", "4"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def check_trained(report: dict[str, Any], steps: int) -> None:
    """Each step had its samples, of its own version, and every version has the trainer's bits, on every node."""
    assert report["drawn"] == [8 * 4] * steps, "samples were lost, or given twice"
    assert report["drawn_at"] == [[f"0.{step}"] for step in range(1, steps + 1)], "0.1 is the trainer's base"
    assert [row["root"] for row in report["versions"]] == [row["want"] for row in report["versions"]]
    assert len({row["want"] for row in report["versions"]}) == steps
    check_live(report, steps)
