"""Socket files and the processes at their two ends: path, owner, permissions, lock.

Only processes of one user may talk to one another: a socket file has mode 0600, and each end asks the kernel which user
runs the other. A lock file beside each socket says whether its server is alive; the kernel releases it when the server
dies, so a socket file without a held lock is stale.
"""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from codec.errors import SwarmError, UsageError

__all__ = [
    "ChannelClosed",
    "bind_socket",
    "check_path",
    "check_same_user",
    "lock_socket",
    "peer_pid",
    "process_named",
    "remove_socket",
    "remove_stale_socket",
]

MAX_PATH_BYTES: Final = 107
"""`sun_path` has 108 bytes, one of them for the closing NUL (unix(7))."""
_CREDENTIALS: Final = "3i"
"""`struct ucred`: pid, uid, gid."""


class ChannelClosed(SwarmError):
    """The process at the other end of a local socket is gone, or this end was closed."""


def check_path(path: Path) -> None:
    """Raises `UsageError` when `path` is too long for a Unix socket."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise UsageError(
            f"The path of the socket {path} has {length} bytes, and the system allows {MAX_PATH_BYTES}. "
            "Choose a shorter folder with SWARM_HOME or --home."
        )


def bind_socket(path: Path, backlog: int) -> socket.socket:
    """A listening socket at `path`, which `check_path` accepted and where no file is. Only this user can connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)  # no process can connect before listen()
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def lock_socket(path: Path) -> Iterator[None]:
    """Hold `path.lock` while serving `path`. The holder owns the socket file.

    Raises `UsageError` when another process holds it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"Another process already serves {path}. Stop it first, or choose another folder with SWARM_HOME."
            ) from error
        yield
    finally:
        os.close(fd)


def remove_stale_socket(path: Path) -> None:
    """Remove the socket file of a dead process. Raises `UsageError` when another kind of file is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is not a socket. Move it away, or choose another folder with SWARM_HOME.")
    remove_socket(path)


def remove_socket(path: Path) -> None:
    """Remove a socket file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def check_same_user(sock: Any) -> None:
    """Raises `ChannelClosed` unless the process at the other end of `sock` runs as this user."""
    _, uid, _ = _credentials(sock)
    if uid != os.getuid():
        raise ChannelClosed(f"the process at the other end runs as user {uid}, not as {os.getuid()}")


def peer_pid(sock: Any) -> int:
    """The process at the other end of `sock`; 0 where the kernel cannot say (another PID namespace)."""
    try:
        return _credentials(sock)[0]
    except OSError:
        return 0


def process_named(pid: int) -> str:
    """A silent process with its state, for an error text: "process 12, which is stopped". 0: a process unknown here."""
    if not pid:
        return "a process of another container"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = "X"
    seen = {
        "T": f", which is stopped (kill -CONT {pid} resumes it)", "t": ", which a debugger holds",
        "D": ", which waits for a disk", "X": ", which has ended", "Z": ", which has ended",
    }  # fmt: skip
    return f"process {pid}{seen.get(state, '')}"


def _credentials(sock: Any) -> tuple[int, int, int]:
    """(pid, uid, gid) of the other end, as the kernel recorded them when it connected."""
    size = struct.calcsize(_CREDENTIALS)
    pid, uid, gid = struct.unpack(_CREDENTIALS, sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid, gid
