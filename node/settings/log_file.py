"""A log file of limited size: when it is full it becomes FILE.1, the one before FILE.2, and so on."""

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import Final

from codec.errors import UsageError

__all__ = ["LogFile"]

MAX_BYTES: Final = 20_000_000
"""Of one file; a busy node writes some MB a day."""
OLDER: Final = 4
"""Full files that are kept beside the one that is written."""


class LogFile:
    """Appends lines to `path`. Several processes may write to one file: each opens it again when another process has
    renamed it, and only one renames. Thread-safe. A full disk loses lines; it never ends the process."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Raises `UsageError` when the file cannot be written."""
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            raise UsageError(f"--log-file: cannot write {path}: {error.strerror}.") from error

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, line: str) -> None:
        """Append `line` and a line break."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_current():
                os.close(self._descriptor)
                self._descriptor = self._open()
            os.write(self._descriptor, line.encode(errors="replace") + b"\n")
            if os.fstat(self._descriptor).st_size >= self._max_bytes:
                self._rotate()

    def _is_current(self) -> bool:
        """Whether the open file is still the one of this name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # another process may rename this very file now
        if not self._is_current():
            return
        for number in range(OLDER, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._numbered(number - 1), self._numbered(number))
        os.replace(self._path, self._numbered(1))
        full, self._descriptor = self._descriptor, self._open()
        os.close(full)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def close(self) -> None:
        """No line is written after this."""
        with self._lock:
            os.close(self._descriptor)
