"""TCP ports of this machine for servers that bind them later."""

import random
import socket
from contextlib import suppress
from typing import Final

from codec.errors import UsageError

__all__ = ["free_port"]

NOT_EPHEMERAL: Final = range(16384, 32768)
"""Ports that Linux, as it is set up by default, gives to no socket that asks for any port, as each connection does."""
TRIES: Final = 100


def free_port() -> int:
    """A port of loopback at which nothing listens. Raises `UsageError` when none is found.

    An inference server loads for long before it binds its port. Had the system chosen the port, then it could give
    the same one to another socket in the meantime.
    """
    for port in random.SystemRandom().sample(NOT_EPHEMERAL, TRIES):
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise UsageError(f"No port from {NOT_EPHEMERAL.start} to {NOT_EPHEMERAL.stop - 1} of this machine is free.")
