"""A command in a terminal of its own, and what that terminal showed."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

__all__ = ["InTerminal", "plain"]


def plain(text: str) -> str:
    """`text` without the sequences that move the cursor and colour the screen."""
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>78])", "", text).replace("\r", "")


class InTerminal:
    """`swarm-node *words` with a pseudo-terminal as stdin, stdout and stderr; killed when the block ends."""

    def __init__(
        self, *words: str, columns: int = 120, rows: int = 40, home: Path | None = None,
        environment: Mapping[str, str] | None = None, command: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """`command`: another one than `swarm-node`."""
        self._main, other = pty.openpty()
        self.resize(columns, rows)
        variables = os.environ | ({} if home is None else {"SWARM_HOME": str(home)}) | dict(environment or {})
        self.process = subprocess.Popen(
            [*(command or (sys.executable, "-m", "node.cli")), *words],
            stdin=other, stdout=other, stderr=other, env=variables, start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )  # fmt: skip
        os.close(other)
        self._closed = False
        self.raw = ""
        """All that came so far."""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def text(self) -> str:
        return plain(self.raw)

    @property
    def _readable(self) -> bool:
        return self._ready(0.0) and not self._closed

    def _ready(self, within_s: float) -> bool:
        poll = select.poll()  # `select` takes no descriptor beyond 1023
        poll.register(self._main, select.POLLIN)
        return bool(poll.poll(within_s * 1000.0))

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def read(self, within_s: float) -> None:
        """Read what comes within this time; returns at once when the terminal is closed."""
        if self._ready(within_s):
            try:
                self.raw += os.read(self._main, 65536).decode(errors="replace")
            except OSError:  # the process has ended
                self._closed = True
                time.sleep(0.05)

    def until(self, pattern: str, within_s: float = 60.0, *, since: int = 0) -> str:
        """Read until the text that came after position `since` of `raw` matches; returns the text."""
        deadline = time.monotonic() + within_s
        while re.search(pattern, plain(self.raw[since:])) is None:
            ended = self.process.poll() is not None and not self._readable
            assert not ended, f"ended before {pattern!r}:\n{self.text[-4000:]}"
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.text[-4000:]}"
            self.read(0.2)
        return self.text

    def ends(self, within_s: float = 20.0) -> int:
        """The exit code, once the process has ended."""
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
            self.read(0.1)
        self.read(0.1)
        return self.process.returncode

    def __enter__(self) -> "InTerminal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._main)
