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
        self._full_at = max_bytes
        """Size at which the file is renamed. It rises when that fails, so that not each line tries again."""
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        """None: `close` was called."""
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
            if self._descriptor is None:
                return
            current = self._descriptor if self._is_current(self._descriptor) else self._reopened(self._descriptor)
            os.write(current, line.encode(errors="replace") + b"\n")
            if (size := os.fstat(current).st_size) >= self._full_at:
                self._full_at = size + self._max_bytes
                self._rotate(current)

    def _is_current(self, descriptor: int) -> bool:
        """Whether the open file is still the one of this name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _reopened(self, old: int) -> int:
        """Open the file of this name instead of `old`; `old` stays open when that fails."""
        self._descriptor = new = self._open()
        self._full_at = self._max_bytes
        os.close(old)
        return new

    def _rotate(self, full: int) -> None:
        try:
            fcntl.flock(full, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process renames this very file now; the next line opens the new one
            return
        try:
            if self._is_current(full):
                self._rename()
        finally:
            fcntl.flock(full, fcntl.LOCK_UN)
        self._reopened(full)

    def _rename(self) -> None:
        for number in range(OLDER, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._numbered(number - 1), self._numbered(number))
        os.replace(self._path, self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def close(self) -> None:
        """No line is written after this."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)
