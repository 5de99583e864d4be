"""Sees what SQLite writes and syncs, through a VFS of its own that passes everything on to the usual one.

A VFS is SQLite's interface to the operating system (https://sqlite.org/vfs.html). The one that is registered here is a
copy of the default VFS whose files have three other methods: `xWrite`, `xTruncate` and `xSync` first ask a `Watcher`.
So a virtual disk learns what is durable, and can refuse a write as a full disk does. Python's `sqlite3` must use the
same shared library as `ctypes` finds; `installed` raises `UsageError` where it does not.
"""

import ctypes
import ctypes.util
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

from codec.errors import UsageError

__all__ = ["Watcher", "installed"]

_OK: Final = 0
_FULL: Final = 13
_IOERR: Final = 10
_CANTOPEN: Final = 14
_VFS_BYTES: Final = 168
"""`sqlite3_vfs` of version 3 on a 64-bit machine: three ints with padding, three pointers, sixteen methods."""
_VFS_NAME_AT, _VFS_OPEN_AT = 24, 40
_METHODS_BYTES: Final = 160
"""`sqlite3_io_methods` of version 3: an int with padding, eighteen methods, and room for one more."""
_WRITE_AT, _TRUNCATE_AT, _SYNC_AT = 24, 32, 40

_Open = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)
)
_Write = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_Truncate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_Sync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class Watcher(Protocol):
    """Asked before each operation on a database's files; called from SQLite, so it must not raise."""

    def refuses(self, what: str, path: Path) -> str:
        """`what`: open, write, truncate or sync. The answer: empty: go on; `full`: the disk is full; `gone`: the
        process does not exist any more."""
        ...

    def synced(self, path: Path) -> None:
        """The file's bytes are on the disk now."""
        ...


_CODES: Final = {"full": _FULL, "gone": _IOERR}


class _Shim:
    """The registered VFS, and all that must stay alive as long as it is."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.watcher: Watcher = _Trial()
        self._library = library
        library.sqlite3_vfs_find.restype = ctypes.c_void_p
        library.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
        library.sqlite3_vfs_register.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.sqlite3_vfs_unregister.argtypes = [ctypes.c_void_p]
        self._default: int = library.sqlite3_vfs_find(None)
        self._paths: dict[int, Path] = {}
        """By address of an open file."""
        self._methods: dict[int, tuple[Any, ...]] = {}
        """By address of the usual methods: ours, and what they call."""
        self._name = ctypes.create_string_buffer(b"hunt")
        self._vfs = ctypes.create_string_buffer(ctypes.string_at(self._default, _VFS_BYTES), _VFS_BYTES)
        self._usual_open = _Open(_word(self._default + _VFS_OPEN_AT))
        self._open = _Open(self._opened)
        _put(ctypes.addressof(self._vfs) + _VFS_NAME_AT, ctypes.addressof(self._name))
        _put(ctypes.addressof(self._vfs) + _VFS_OPEN_AT, _address(self._open))

    def register(self) -> None:
        self._library.sqlite3_vfs_register(ctypes.addressof(self._vfs), 1)

    def unregister(self) -> None:
        self._library.sqlite3_vfs_unregister(ctypes.addressof(self._vfs))
        self._library.sqlite3_vfs_register(self._default, 1)

    def _opened(self, vfs: int, name: int | None, file: int, flags: int, out: Any) -> int:
        """`name`: the address of the path, which must be passed on as it is: SQLite keeps it."""
        path = Path(ctypes.string_at(name).decode() if name else "")
        if name and self.watcher.refuses("open", path) == "gone":
            _put(file, 0)
            return _CANTOPEN
        code = self._usual_open(self._default, name, file, flags, out)
        usual = _word(file)
        if code == _OK and usual and name:
            self._paths[file] = path
            if usual not in self._methods:
                self._methods[usual] = self._wrapped(usual)
            _put(file, ctypes.addressof(self._methods[usual][0]))
        return code

    def _wrapped(self, usual: int) -> tuple[Any, ...]:
        write = _Write(_word(usual + _WRITE_AT))
        truncate = _Truncate(_word(usual + _TRUNCATE_AT))
        sync = _Sync(_word(usual + _SYNC_AT))

        def guarded(what: str, call: Callable[..., int]) -> Callable[..., int]:
            def asked(file: int, *args: Any) -> int:
                verdict = self.watcher.refuses(what, self._paths[file])
                return _CODES[verdict] if verdict else call(file, *args)

            return asked

        sync_if_allowed = guarded("sync", sync)

        def synced(file: int, flags: int) -> int:
            code = sync_if_allowed(file, flags)
            if code == _OK:
                self.watcher.synced(self._paths[file])
            return code

        ours = ctypes.create_string_buffer(ctypes.string_at(usual, _METHODS_BYTES), _METHODS_BYTES)
        callbacks = (_Write(guarded("write", write)), _Truncate(guarded("truncate", truncate)), _Sync(synced))
        for at, callback in zip((_WRITE_AT, _TRUNCATE_AT, _SYNC_AT), callbacks, strict=True):
            _put(ctypes.addressof(ours) + at, _address(callback))
        return ours, callbacks, write, truncate, sync


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _put(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _address(callback: Any) -> int:
    return ctypes.cast(callback, ctypes.c_void_p).value or 0


@contextmanager
def installed(watcher: Watcher, scratch: Path) -> Iterator[None]:
    """Within it, databases that are opened are watched. `scratch`: a folder for a trial.

    Raises `UsageError` when Python's `sqlite3` does not use the library that was changed.
    """
    name = ctypes.util.find_library("sqlite3")
    if name is None:
        raise UsageError("The fault factory needs the shared library of SQLite (libsqlite3.so.0): install it.")
    trial = _Trial()
    shim = _shim(name)
    shim.watcher = trial
    shim.register()
    try:
        with closing(sqlite3.connect(scratch / "trial.sqlite")) as database, suppress(sqlite3.Error):
            database.execute("create table trial (number integer)")
            database.commit()
        if not trial.seen:
            raise UsageError(
                "The fault factory cannot watch this Python's sqlite3, which has a SQLite of its own built in: use a "
                "Python that is linked to the system's libsqlite3 (as Debian's is)."
            )
        shim.watcher = watcher
        yield
    finally:
        shim.unregister()


@cache
def _shim(library: str) -> _Shim:
    """One for the whole process: a connection that was never closed may still use it."""
    return _Shim(ctypes.CDLL(library))


class _Trial:
    """Notes whether anything was synced."""

    seen = False

    def refuses(self, what: str, path: Path) -> str:
        return ""

    def synced(self, path: Path) -> None:
        self.seen = True
