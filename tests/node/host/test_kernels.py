"""The first start compiles the kernels and logs it; the second does neither."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import trio
from node.host import kernels
from node.settings import logs
logs.configure()
trio.run(kernels.warm_up, ["U8"])
from codec.kernels import codes, lanes, planes, scan
used = [f for module in (codes, planes, scan) for f in vars(module).values() if getattr(f, "signatures", ())]
print(len(used), sum(sum(f.stats.cache_misses.values()) for f in used))
"""


def start(cache: Path) -> tuple[int, int, str]:
    """(kernels loaded, kernels compiled in this process, log lines)."""
    environment = os.environ | {"SWARM_CACHE": str(cache)}
    run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    used, missed = run.stdout.splitlines()[-1].split()
    return int(used), int(missed), run.stderr + run.stdout


@pytest.mark.slow
@pytest.mark.long
def test_the_first_start_logs_that_it_compiles_and_the_second_compiles_nothing(tmp_path: Path) -> None:
    used, missed, log_lines = start(tmp_path)
    assert used > 5
    assert missed == 0  # a child process compiled them
    assert "once on this machine" in log_lines
    used, missed, log_lines = start(tmp_path)
    assert used > 5
    assert missed == 0
    assert "compil" not in log_lines
