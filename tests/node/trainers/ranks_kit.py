"""Runs trainers of several ranks as real processes over gloo."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WITHIN_S = 300.0


class RankFailed(AssertionError):
    """A rank ended with an error. The text is the rank's own traceback."""


def run_ranks(world: int, function: str, *args: Any, dies: Sequence[int] = (), within_s: float = WITHIN_S) -> list[Any]:
    """Return what `module:function(rank, world, *args)` returned in each of `world` processes that form one gloo group.

    `dies`: ranks that end without a result (None).
    """
    running = Running(world, function, *args)
    try:
        return running.results(dies, within_s)
    finally:
        running.kill()


class Running:
    """The running processes of the ranks. Each writes its pickled result to a file before it ends."""

    def __init__(self, world: int, function: str, *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "task").write_bytes(pickle.dumps((function, args)))
        self._files = [folder / f"result{rank}" for rank in range(world)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder), str(rank), str(world)],
                env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(world)
        ]

    def results(self, dies: Sequence[int] = (), within_s: float = WITHIN_S) -> list[Any]:
        deadline = time.monotonic() + within_s
        alive = [rank for rank in range(len(self.processes)) if rank not in dies]
        while any(self.processes[rank].poll() is None for rank in alive):
            if any(self.processes[rank].poll() for rank in alive) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        time.sleep(0.1)  # the other ranks may write their errors too
        found: list[Any] = [None] * len(self.processes)
        for rank in alive:
            if not self._files[rank].exists():
                raise RankFailed(f"rank {rank} has no result, code {self.processes[rank].poll()}{self._errors()}")
            ok, found[rank] = pickle.loads(self._files[rank].read_bytes())
            if not ok:
                raise RankFailed(self._errors())
        return found

    def _errors(self) -> str:
        texts = []
        for rank, file in enumerate(self._files):
            if file.exists():
                ok, value = pickle.loads(file.read_bytes())
                texts += [] if ok else [f"\nrank {rank}: {value}"]
        return "".join(texts)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()


def _main(folder: Path, rank: int, world: int) -> None:
    import torch.distributed as dist

    name, args = pickle.loads((folder / "task").read_bytes())
    module, _, attribute = name.partition(":")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    result: tuple[bool, Any]
    try:
        function: Callable[..., Any] = getattr(__import__(module), attribute)
        result = True, function(rank, world, *args)
    except BaseException:
        result = False, traceback.format_exc()
    (folder / f"partial{rank}").write_bytes(pickle.dumps(result))
    (folder / f"partial{rank}").rename(folder / f"result{rank}")
    sys.stdout.flush()
    os._exit(0 if result[0] else 1)  # without cleaning up, which would wait for ranks that are gone


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
