"""Real processes on this machine: the one way to start them, wait for them and end them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from codec.errors import UsageError

__all__ = ["PATIENCE_S", "ProcessFailed", "Processes", "group_alive", "kill", "next_line", "outputs"]

PATIENCE_S: Final = 45.0
"""Default time limit, s: CI has two busy cores, and the first use of a kernel compiles it."""
END_WITHIN_S: Final = 15.0
"""Time limit for a process to end after a signal, s."""
POLL_S: Final = 0.05
LAST_CHARACTERS: Final = 4000
"""How much of a log a failure shows."""

Found = TypeVar("Found")


class ProcessFailed(UsageError):
    """A process ended, or a condition was not met in time. The text has the last log lines of all processes."""


class Processes:
    """Processes by name, each the leader of its own process group, with its log in `folder`.

    `running` has those that were started in the background and not ended here; a process that ended by itself stays in
    it. `on`: what starts the process of a name, called as `subprocess.Popen` is; an emulated host's `popen`, for
    example. `environment`: variables for all processes.
    """

    starts: Callable[..., Any] = subprocess.Popen
    """What starts processes; the tests have some forked (`scenarios.harness.forked`)."""

    def __init__(
        self,
        folder: Path,
        *,
        on: Callable[[str], Callable[..., Any]] = lambda name: Processes.starts,
        environment: dict[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.folder, self.patience_s = folder, patience_s
        self.running: dict[str, subprocess.Popen[Any]] = {}
        self.paused: set[str] = set()
        """Names of running processes that `pause` stopped."""
        self._on, self._environment = on, {"OMP_NUM_THREADS": "1"} | (environment or {})
        self._all: list[subprocess.Popen[Any]] = []

    # ------------------------------------------------------------ start

    def popen(
        self, name: str, command: Sequence[str], *, environment: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command that `close` ends. `environment`: more variables. `options`: as for `subprocess.Popen`."""
        variables = os.environ | self._environment | (environment or {})
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
        process = self._on(name)(command, env=variables, **options)
        self._all.append(process)
        return process

    def start_command(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command in the background, its output to its log. `options`: as for `popen`."""
        with self._log_path(name).open("ab") as log:
            self.running[name] = self.popen(name, command, stdout=log, stderr=log, **options)
        return self.running[name]

    def pid(self, name: str) -> int:
        """The id of a running process."""
        return self.running[name].pid

    # ------------------------------------------------------------ end

    def signal(self, name: str, number: int = signal.SIGTERM, within_s: float = END_WITHIN_S) -> int:
        """Send the process (not its group) a signal that ends it; returns its exit code (-9 for SIGKILL)."""
        self.running[name].send_signal(number)
        return self.ends(name, within_s)

    def kill(self, name: str) -> None:
        """Kill the process with its group."""
        kill(self.running.pop(name))

    def pause(self, name: str) -> None:
        """Stop the process and its group (SIGSTOP) until it is killed. Nothing waits for it from then on."""
        self.paused.add(name)
        os.killpg(self.running[name].pid, signal.SIGSTOP)

    def ends(self, name: str, within_s: float = PATIENCE_S) -> int:
        """Wait until the process ends; returns its exit code. Kills it and raises `ProcessFailed` after `within_s`."""
        process = self.running.pop(name)
        try:
            return process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            kill(process)
            raise ProcessFailed(f"{name} did not end in {within_s:.0f} s: {self.log(name)}") from None

    def forget(self, *names: str) -> None:
        """Kill these processes, if they run, and remove their logs."""
        for name in names:
            if name in self.running:
                self.kill(name)
            self._log_path(name).unlink(missing_ok=True)

    def close(self) -> list[int]:
        """Kill every remaining process group; returns the ids of groups in which a process outlived its leader."""
        orphans = []
        for process in self._all:
            led = process.poll() is None
            kill(process)
            if not led and group_alive(process.pid):
                orphans.append(process.pid)
        return orphans

    # ------------------------------------------------------------ wait

    def wait(
        self,
        goal: str,
        condition: Callable[[], Found],
        within_s: float | None = None,
        *,
        of: Sequence[str] | None = None,
    ) -> Found:
        """Wait until `condition` returns something true; returns that.

        Raises `ProcessFailed`, which says that `goal` was not reached, after `within_s` (`patience_s`, if None), or as
        soon as a process has ended. `of`: names of the processes that must run meanwhile; all that run, if None.
        """
        within_s = self.patience_s if within_s is None else within_s
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            for name in list(self.running) if of is None else of:
                if (code := self.running[name].poll()) is not None:
                    raise ProcessFailed(f"{name} ended with {code} before {goal}.\n{self.logs()}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"Waited {within_s:.0f} s, but not: {goal}.\n{self.logs()}")
            time.sleep(POLL_S)
        return found

    def until_logged(self, name: str, pattern: str, within_s: float | None = None) -> None:
        """Wait until the log of `name` matches the regular expression `pattern`, also if the process has ended."""
        self.wait(f"{name} logs {pattern}", lambda: re.search(pattern, self.log(name, 1 << 26)), within_s, of=())

    def until_event(self, name: str, event: str, within_s: float | None = None, **fields: Any) -> float:
        """Wait until `name` has logged `event` with these fields; returns when, in seconds since the epoch."""

        def logged() -> float | None:
            return self.logged_at(name, event, **fields)

        return self.wait(f"{name} logs {event} {fields or ''}", logged, within_s) or 0.0

    def logged_at(self, name: str, event: str, **fields: Any) -> float | None:
        """When `name` first logged `event` with these fields, in seconds since the epoch; None: not yet."""
        wanted = {"event": event} | fields
        for line in self.log(name, 1 << 26).splitlines():
            if f'"{event}"' in line and wanted == {key: (entry := json.loads(line)).get(key) for key in wanted}:
                return datetime.fromisoformat(entry["timestamp"]).timestamp()
        return None

    # ------------------------------------------------------------ logs

    def log(self, name: str, last: int = LAST_CHARACTERS) -> str:
        """The last characters of a log; empty if there is none."""
        path = self._log_path(name)
        return path.read_text(errors="replace")[-last:] if path.exists() else ""

    def logs(self) -> str:
        """The last log lines of all processes in `running`, and the exit codes of those that ended."""
        return "\n".join(f"--- {name} ({process.poll()}): {self.log(name)}" for name, process in self.running.items())

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"


# ------------------------------------------------------------ single processes


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a process group, and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def group_alive(leader: int) -> bool:
    """Whether a process lives in the process group of `leader`."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def next_line(process: subprocess.Popen[str], word: str = "", within_s: float = PATIENCE_S) -> str:
    """The rest of the next line of the process's output that begins with `word`; without `word`, the next line.

    Raises `ProcessFailed` when the process ends before that, and after `within_s`.
    """
    found: list[str] = []

    def read() -> None:
        for line in iter(process.stdout.readline, "") if process.stdout else ():
            if not word or line.split()[:1] == [word]:
                found.append(line.strip().removeprefix(word).lstrip())
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(within_s)
    if not found:
        code = process.poll()
        fate = f"printed nothing for {within_s:.0f} s" if code is None else f"ended with {code}"
        args = process.args
        command = [args] if isinstance(args, (str, bytes, os.PathLike)) else args
        raise ProcessFailed(f"{' '.join(map(str, command))[-300:]} {fate}; expected was a line {word}")
    return found[0]


def outputs(commands: Sequence[Sequence[str]], within_s: float) -> list[str]:
    """Run commands that need each other, as the ranks of a trainer do; returns what each printed on standard output.

    Raises `ProcessFailed` with the error output of one that failed, and after `within_s`. All have ended then.
    """
    with contextlib.ExitStack() as stack:
        running = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for command in commands
        ]  # fmt: skip
        for process in running:
            stack.callback(kill, process)
        found = []
        for process in running:
            try:
                out, err = process.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                raise ProcessFailed(f"{process.args} did not end in {within_s:.0f} s.") from None
            if process.returncode:
                raise ProcessFailed(f"{process.args} ended with {process.returncode}: {err[-800:]}")
            found.append(out)
        return found
