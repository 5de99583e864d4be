"""Listening ports: bound alone, shared only with our own dials; and how many sockets the process may open."""

import errno
import resource
import socket
from collections.abc import Sequence
from typing import Final

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from codec.errors import UsageError
from swarm.transport.connection.addresses import host_and_port, multiaddr_text

__all__ = ["bind", "connect_from", "descriptors"]

_DESCRIPTORS: Final = 16_384
"""Open files that we ask for: 4096 connections, pending ones, a store's files. Shells start programs with a
limit of 1024."""
_BACKLOG: Final = 1024
"""Connections that may wait in the kernel to be accepted. Linux allows at most net.core.somaxconn (4096)."""


async def bind(addresses: Sequence[str]) -> dict[str, socket.socket]:
    """Listen on each address (multiaddr text; port 0 takes a free port). Returns non-blocking sockets by the address
    that each is bound to.

    Raises `UsageError` for text that is no such address and for a port in use; then no socket stays bound.
    """
    listeners: dict[str, socket.socket] = {}
    try:
        for text in addresses:
            listener = await _bind_one(text)
            listeners[multiaddr_text(listener.getsockname())] = listener
    except BaseException:
        for listener in listeners.values():
            listener.close()
        raise
    return listeners


async def _bind_one(text: str) -> socket.socket:
    try:
        target = host_and_port(Multiaddr(text))
    except (MultiaddrError, ValueError) as error:
        raise UsageError(f"{text} is no address to listen on; write it like /ip4/0.0.0.0/tcp/4701.") from error
    if target is None:
        raise UsageError(f"Cannot listen on {text}: only /ip4/.../tcp/... and /ip6/.../tcp/... are supported.")
    host, port = target
    sock = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Allows a port that only has connections in TIME_WAIT; a port with a listener is still refused.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind((host, port))
        sock.listen(_BACKLOG)
        # Set only after binding, so that a port in use is noticed. It lets our own dials share the port
        # (`connect_from`).
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} on {host} is in use by another program; stop it or listen on another port."
            ) from error
        raise UsageError(f"Cannot listen on {text}: {error.strerror}.") from error
    listener = socket.socket(fileno=sock.detach())
    listener.setblocking(False)
    return listener


async def connect_from(port: int, target: tuple[str, int]) -> trio.SocketStream:
    """Dial `target` from our listening port, as hole punching needs it. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        await sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        await sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def descriptors() -> int:
    """Raise this process's limit of open sockets and files to `_DESCRIPTORS` if allowed, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else _DESCRIPTORS
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # the system has a lower limit
        return soft
    return wanted
