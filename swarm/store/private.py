"""Files that only their owner can read, regardless of the folder's mode and the umask."""

import logging
import os
import stat
from pathlib import Path
from typing import Final

__all__ = ["FILE_MODE", "close_to_others", "make_private"]

FILE_MODE: Final = 0o600
_log = logging.getLogger(__name__)


def make_private(database: Path) -> None:
    """Create an empty file for a SQLite database, or make an existing database and its log private.

    Call it before the database is opened: SQLite gives its write-ahead log the mode of the database. Raises `OSError`
    if the file cannot be created or opened. A database in memory (":memory:") has no file.
    """
    if database.name == ":memory:":
        return
    os.close(os.open(database, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
    for path in (database, *(database.with_name(database.name + end) for end in ("-wal", "-shm"))):
        close_to_others(path)


def close_to_others(path: Path) -> bool:
    """Remove the rights of other users to a file, and log a warning; whether they had any.

    A file that does not exist, or belongs to another user, is not changed.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if not mode & 0o077:
            return False
        path.chmod(mode & 0o700)
    except OSError:
        return False
    _log.warning("%s could be read by other users of this machine (mode %o): it is private now", path, mode)
    return True
