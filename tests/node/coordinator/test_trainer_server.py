"""A descriptor that a gateway's process sends is closed once: after that its number may be anybody's."""

import os
import socket

import pytest

from codec.errors import UsageError
from node.coordinator import trainer_server


def test_a_number_that_was_taken_again_stays_open() -> None:
    ours, theirs = socket.socketpair()
    descriptor = theirs.detach()
    with ours, trainer_server._front([descriptor]) as sock:
        sock.close()
        other = os.dup2(ours.fileno(), descriptor)  # as another thread may get it
    os.fstat(other)
    os.close(other)


@pytest.mark.parametrize("kind", ["none", "two", "no socket", "another socket"])
def test_what_is_refused_is_closed(kind: str) -> None:
    descriptors = {
        "none": list,
        "two": lambda: [os.open(os.devnull, os.O_RDONLY) for _ in range(2)],
        "no socket": lambda: [os.open(os.devnull, os.O_RDONLY)],
        "another socket": lambda: [socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()],
    }[kind]()
    with pytest.raises(UsageError, match="gateway"), trainer_server._front(descriptors):
        pass
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
