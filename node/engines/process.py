"""The engine's process, seen from the node: started, started again when it ends, and killed."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

import trio

from codec.errors import UsageError
from node.host.child import child_environment, python_module
from node.host.last_line import last_line
from node.settings.event_log import EventLog

__all__ = ["EngineProcess", "EngineSpec", "worker_command"]

FIRST_PAUSE_S: Final = 0.5
"""Seconds before a process that served is started again; doubled after each start that fails."""
LONGEST_PAUSE_S: Final = 30.0
TRIES_BEFORE_FIRST: Final = 4
"""Starts that may fail before the engine ever served. After these the user must look at it."""
GONE_WITHIN_S: Final = 30.0
"""For the children of a killed process to give their memory back: a GPU's driver takes seconds to clear it."""
LOOK_EVERY_S: Final = 0.05
USAGE: Final = 2
"""Exit code of an engine process whose last line of output is a sentence for the user."""

_log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start one engine process. `socket`: where it connects to the node. `log`: where its output goes."""

    socket: Path
    command: tuple[str, ...]
    log: Path


def worker_command(
    socket: Path, engine: str = "transformers", threads: int | None = None, device: str | None = None
) -> tuple[str, ...]:
    """The command that starts `node.engines.worker` in this Python environment."""
    command = python_module("node.engines.worker", "--socket", str(socket), "--engine", engine)
    command += ["--threads", str(threads)] if threads is not None else []
    return (*command, *(["--device", device] if device is not None else []))


class EngineProcess:
    """Keeps one engine process running. `keep_running` supervises it; the other methods are synchronous."""

    def __init__(self, command: Sequence[str], log: Path, stop_s: float) -> None:
        """`log`: where its output goes. `stop_s`: seconds to wait for a killed process."""
        self._command = list(command)
        self._log = log
        self._stop_s = stop_s
        self._process: trio.Process | None = None
        self._refusal: UsageError | None = None
        self._served = False
        self._released = trio.Event()
        self._ended = trio.Event()
        """No process runs now; replaced when one is started."""
        self._ended.set()
        self.held = False
        """No process is started until `release`."""
        self.restarts = 0
        """How often a process that had served ended and was started again."""

    @property
    def pid(self) -> int:
        """Of the last process that was started."""
        assert self._process is not None
        return self._process.pid

    def mark_served(self) -> None:
        """The running process serves: when it ends, the next one is started soon."""
        self._served = True

    def refuse(self, error: UsageError) -> None:
        """End the process and the supervision: `keep_running` raises `error`."""
        self._refusal = error
        self.kill(str(error))

    def kill(self, why: str) -> None:
        """Kill the process with its children; `keep_running` starts the next one."""
        _log.warning("engine_killed", why=why)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def hold(self) -> None:
        """End the process and its children, and start none until `release`. On return their memory is free, unless it
        takes longer than `GONE_WITHIN_S`."""
        self.held, self._released = True, trio.Event()
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await self._ended.wait()
        with trio.move_on_after(GONE_WITHIN_S):
            while _group_exists(process.pid):  # noqa: ASYNC110 - only the leader of the group is our child
                await trio.sleep(LOOK_EVERY_S)

    def release(self) -> None:
        """Start a process again after `hold`."""
        self.held = False
        self._released.set()

    async def keep_running(self) -> NoReturn:
        """Start the process again whenever it ends. When cancelled, kill it and its children.

        Raises `UsageError`, with the engine's own words, when it cannot be started or refuses the model.
        """
        pause_s, failures = FIRST_PAUSE_S, 0
        while True:
            if self.held:
                await self._released.wait()
            self._served = False
            code = await self._run_once()
            if self._refusal is not None:
                raise self._refusal
            if self.held:
                continue
            if code == USAGE:
                raise UsageError(self._last_words())
            if self._served:
                pause_s, failures = FIRST_PAUSE_S, 0
            else:
                pause_s, failures = min(2 * pause_s, LONGEST_PAUSE_S), failures + 1
            if failures >= TRIES_BEFORE_FIRST and not self.restarts:
                raise UsageError(f"The engine ends before it serves (code {code}): {self._last_words()}")
            if self._served:
                self.restarts += 1
            _log.warning("engine_ended", code=code, pause_s=pause_s)
            await trio.sleep(pause_s)

    def _last_words(self) -> str:
        return last_line(self._log) or f"it said nothing; see {self._log}"

    async def _run_once(self) -> int:
        """Start the process, wait for its end, and leave none of its children. Returns its exit code."""
        self._ended = trio.Event()
        try:
            return await self._start_and_wait()
        finally:
            self._ended.set()

    async def _start_and_wait(self) -> int:
        with _open_to_append(self._log) as log:
            self._process = process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=child_environment(),
            )  # fmt: skip
        try:
            if self.held:  # while it was being started
                self.kill("it is to sleep")
            return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True), trio.move_on_after(self._stop_s):
                await process.wait()


def _group_exists(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _open_to_append(path: Path) -> BinaryIO:
    return open(path, "ab")
