"""The kernel cache: kernels are compiled once per machine and version of their sources."""

import os
import subprocess
import sys
from pathlib import Path

from codec.kernels import jit

CODE = """
import numpy as np
from codec.kernels import jit
from codec.kernels.scan import scatter
before = jit.compiled()
words = np.zeros(3, np.uint16)
scatter(words, np.array([1], np.uint32), np.array([7], np.uint16))
assert words[1] == 7
hits = sum(scatter.stats.cache_hits.values())
print(before, hits, jit.cache_folder())
"""


def start(cache: Path, **environment: str) -> tuple[bool, int, str]:
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "SWARM_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    before, hits, folder = run.stdout.split()
    return before == "True", int(hits), folder


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert first[:2] == (False, 0)
    assert first[2].startswith(str(tmp_path))
    assert start(tmp_path)[:2] == (True, 1)


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    """The machine code in the cache is executed."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    assert jit._usable(folder)
    folder.chmod(0o777)
    assert not jit._usable(folder)


def test_the_key_covers_every_file_with_kernels() -> None:
    here = Path(jit.__file__).parent
    uses = {path.name for path in here.glob("*.py") if "codec.kernels.jit import kernel" in path.read_text()}
    assert uses <= set(jit._SOURCES)
    assert "lanes.py" in jit._SOURCES
