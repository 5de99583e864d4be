"""What the disk benchmark counts of a process, and the unit it compares with."""

import os
from pathlib import Path

from scenarios.bench.disk import _floor, _spent


def test_bytes_read_and_written_are_counted(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 3 << 20
    before = _spent(os.getpid())
    path.write_bytes(bytes(nbytes))
    spent = _spent(os.getpid()).minus(before)
    assert nbytes <= spent.wrote < nbytes + (64 << 10)
    floor = _floor(path)
    assert nbytes <= floor.read < nbytes + (64 << 10)
    assert floor.wrote < 64 << 10
