"""The file that holds a private key: one line of text, readable by its owner only, never overwritten."""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from codec.sign import Key

__all__ = ["AUTHORITY_KEY", "NODE_KEY", "load", "load_or_make", "make", "write"]

AUTHORITY_KEY: Final = "authority.key"
"""In the seed's SWARM_HOME. Its holder controls the swarm."""
NODE_KEY: Final = "node.key"
"""In a member's SWARM_HOME, made at its first start."""

_PREFIX: Final = "swarm-key-1:"
_MAX_BYTES: Final = 256


def write(path: Path, key: Key) -> None:
    """Write `key` to a new file of mode 0600, durable on return; on a full disk no file is left. Raises `UsageError`,
    also when the file exists."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{_PREFIX}{key.seed.hex()}\n")
            file.flush()
            os.fsync(file.fileno())
        _name(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            raise UsageError(f"{path} exists, and a key is never overwritten. Choose another name.") from error
        raise UsageError(f"Cannot write the key to {path}: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _name(partial: Path, path: Path) -> None:
    """Give the complete file its name. Raises `FileExistsError`: unlike a rename, a link never replaces a file."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(partial, path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: Path) -> Key:
    """The key in `path`. Raises `UsageError` when there is no file, it holds no key, or other users may read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UsageError(f"There is no key at {path}. Make one: swarm-node keygen --out {path}") from error
    except OSError as error:
        raise UsageError(f"Cannot read the key at {path}: {error.strerror}.") from error
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"Others on this machine may read the key at {path}. Close it: chmod 600 {path}")
    match = re.fullmatch(rb"%b([0-9a-f]{64})\s*" % _PREFIX.encode(), text)
    if match is None:
        raise UsageError(f"{path} is not a swarm-node key file: it does not hold one line that begins with {_PREFIX}")
    return Key(bytes.fromhex(match[1].decode()))


def make(path: Path) -> bool:
    """Make a key in `path` unless there is one. True: this call made it. Of several processes one makes it."""
    if path.exists():
        return False
    try:
        write(path, Key.generate())
    except UsageError:
        if path.exists():  # another process was faster
            return False
        raise
    return True


def load_or_make(path: Path) -> Key:
    """The key in `path`, made at the first call, so that a machine keeps its identity across restarts."""
    make(path)
    return load(path)
