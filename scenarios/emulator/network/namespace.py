"""Network namespaces without names: each exists only while a process holds it open, so none has to be cleaned up."""

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from codec.errors import UsageError

__all__ = [
    "MARK",
    "check_privileges",
    "end_orphans",
    "end_processes",
    "enter",
    "in_thread",
    "inode",
    "ip",
    "mark",
    "new_namespace",
    "open_tun",
    "set_sysctl",
]

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TCP4 = 0x01, 0x02
MARK: Final = "WAN_DRIVER"
"""Environment variable of every emulated process; its value is `mark()`."""
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def check_privileges() -> None:
    """Raise `UsageError` where namespaces and TUN devices cannot be created."""
    if os.geteuid() != 0:
        raise UsageError("The WAN emulator creates network namespaces, which needs root: run this as root.")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise UsageError("The WAN emulator needs /dev/net/tun: give the container that device and CAP_NET_ADMIN.")


def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a new thread, which may change its namespace and then ends."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:  # raised again below
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def new_namespace() -> int:
    """Put this thread into a new, empty network namespace and return a descriptor that keeps it alive.

    Raises `UsageError` when the system refuses.
    """
    if _libc.unshare(_CLONE_NEWNET):
        error = ctypes.get_errno()
        raise UsageError(f"Cannot create a network namespace: {os.strerror(error)} (CAP_SYS_ADMIN is needed).")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter(fd: int) -> None:
    """Put this thread (or, between fork and exec, the child) into the namespace behind `fd`. Raises `OSError`."""
    if _libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def inode(fd: int) -> int:
    """Return the inode of the namespace behind `fd`, which identifies it system-wide."""
    return os.fstat(fd).st_ino


def open_tun(name: str, *, large_segments: bool) -> int:
    """Create a TUN device in this thread's namespace and return its descriptor.

    `large_segments`: TCP hands over up to 64 KiB at a time (TSO).
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | (_OFFLOAD_TCP4 if large_segments else 0))
    return fd


def ip(*arguments: str) -> None:
    """Run iproute2's `ip` in this thread's namespace. Raises `UsageError` when it is not installed."""
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("The WAN emulator needs the `ip` command: install iproute2.") from None


def set_sysctl(name: str, value: str) -> None:
    """Set the sysctl `net.ipv4.NAME` of this thread's namespace."""
    Path("/proc/sys/net/ipv4", name).write_text(value)


def end_processes(namespaces: Iterable[int]) -> None:
    """Kill every process in one of these network namespaces (inodes), until none is left."""
    wanted = {f"net:[{number}]" for number in namespaces}
    while found := [pid for pid in _pids() if _namespace(pid) in wanted]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def mark() -> str:
    """Return the value that this driver's processes carry under `MARK`: the driver's pid and start time."""
    return f"{os.getpid()}:{_started(os.getpid())}"


def end_orphans() -> None:
    """Kill processes of a driver that has ended. Only a driver that was killed together with its wire leaves any."""
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        for entry in environment.split(b"\0"):
            name, _, driver = entry.partition(b"=")
            if name.decode(errors="replace") == MARK:
                owner, _, started = driver.decode(errors="replace").partition(":")
                if owner.isdigit() and _started(int(owner)) != started:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _started(pid: int) -> str:
    """Return when a process began, in clock ticks since boot; empty when no such process exists.

    Pids are reused, but a pid with its start time is unique.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _pids() -> Iterable[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended, or is a zombie
        return ""
