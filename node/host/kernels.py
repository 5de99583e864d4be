"""Compiling the coder's kernels once a machine, at start and out of the way, so that the first version is not late.

A first compilation takes some 20 seconds of a core and most of the interpreter's lock, so a child process does it and
leaves it in numba's cache. Of several processes that start together one compiles, the others wait for it.
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
"""What policies are made of, where the layout is not known yet."""

_CHILD: Final = """
import fcntl, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
def end_with_parent():
    sys.stdin.buffer.read()  # ends when whoever started us does, however it ends
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
from pathlib import Path
from codec.bits import DTYPES
from codec.kernels.jit import cache_folder
from codec.rice import warm_up
with open(cache_folder() / "compiling", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    for name in sys.argv[1:]:
        warm_up(DTYPES[name])
        (cache_folder() / f"compiled-{name}").touch()
os._exit(0)
"""


async def warm_up(dtypes: Iterable[str] = ()) -> None:
    """Have the kernels for these dtypes (none: bf16) compiled and loaded. Says so where it takes time."""
    names = sorted(set(dtypes) or {_DEFAULT})
    missing = [name for name in names if not _marker(name).exists()]
    if missing:
        _log.info("compiling_kernels", dtypes=", ".join(missing), note="once on this machine, about 20 s")
        began = trio.current_time()
        if not await _compile(missing):
            return  # no room for a cache, say: the first use compiles
        _log.info("compiled_kernels", seconds=round(trio.current_time() - began, 1))
    from codec.rice import warm_up as load

    for name in names:
        await in_thread(load, DTYPES[name])


async def _compile(names: list[str]) -> bool:
    """In a child, which is killed when we are cancelled and ends by itself when we are killed."""
    start = partial(
        trio.run_process,
        [sys.executable, "-P", "-c", _CHILD, *names],
        stdin=subprocess.PIPE,  # open, and empty, for as long as we live
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
    process.kill()  # numba's cache is written beside its place and renamed, so this harms nothing


def _marker(name: str) -> Path:
    return cache_folder() / f"compiled-{name}"
