"""Compiles the coder's kernels once on a machine, when a process starts, so that the first version is not late.

The first compilation takes some 20 seconds of a core and most of the interpreter's lock, so a child process does it and
leaves the result in numba's cache. When several processes start together, one compiles and the others wait for it.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from codec.bits import DTYPES
from codec.kernels.jit import cache_folder
from swarm.runtime import in_thread

__all__ = ["warm_up"]

_log = structlog.get_logger(__name__)
_DEFAULT: Final = "BF16"
"""Used while the layout is not known: the dtype of most policies."""

_CHILD: Final = """
import fcntl, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
def end_with_parent():
    sys.stdin.buffer.read()  # ends when the parent ends, in any way
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
from pathlib import Path
from codec.bits import DTYPES
from codec.kernels.jit import cache_folder
from codec.staging import warm_up
with open(cache_folder() / "compiling", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    for name in sys.argv[1:]:
        warm_up(DTYPES[name])
        (cache_folder() / f"compiled-{name}").touch()
os._exit(0)
"""


async def warm_up(dtypes: Iterable[str] = ()) -> bool:
    """Compile and load the kernels for these dtypes (none: bf16); whether they are loaded. Logs a line when it has to
    compile."""
    names = sorted(set(dtypes) or {_DEFAULT})
    missing = [name for name in names if not _marker(name).exists()]
    if missing:
        _log.info("compiling_kernels", dtypes=", ".join(missing), note="once on this machine, about 20 s")
        began = trio.current_time()
        if not await _compile(missing):
            return False  # the cache is full or read-only, for example: the first use compiles
        _log.info("compiled_kernels", seconds=round(trio.current_time() - began, 1))
    from codec.staging import warm_up as load

    for name in names:
        await in_thread(load, DTYPES[name])
    return True


async def _compile(names: list[str]) -> bool:
    """Compile in a child process, which is killed on cancellation and ends by itself when this process is killed."""
    start = partial(
        trio.run_process,
        [sys.executable, "-P", "-c", _CHILD, *names],
        stdin=subprocess.PIPE,  # stays open, and empty, while this process lives
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        deliver_cancel=_kill,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(start)
        await process.wait()
    return all(_marker(name).exists() for name in names)


async def _kill(process: trio.Process) -> None:
    process.kill()  # safe: numba writes each cache file under another name and renames it


def _marker(name: str) -> Path:
    return cache_folder() / f"compiled-{name}"
