"""Files that only their owner may read, whatever the folder and the umask allow."""

import logging
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["FILE_MODE", "close_to_others", "make_private"]

FILE_MODE: Final = 0o600
_log = logging.getLogger(__name__)


def make_private(database: Path) -> None:
    """Make an empty file for a database that is to be opened there; close one that others can read, and its log.

    SQLite gives its write-ahead log the mode of the database. Raises `OSError` when the file can be neither made nor
    opened. A database in memory (":memory:") has no file.
    """
    if database.name == ":memory:":
        return
    os.close(os.open(database, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
    for path in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm"))):
        close_to_others(path)


def close_to_others(path: Path) -> bool:
    """Take everybody else's rights to a file, with a line in the log; whether they had any.

    Nothing is changed where nothing is there, or where the file is somebody else's.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if not mode & 0o077:
            return False
        path.chmod(mode & 0o700)
    except OSError:
        return False
    _log.warning("%s could be read by other users of this machine (mode %o): it is closed now", path, mode)
    return True
