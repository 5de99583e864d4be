"""What is read of a process in `/proc`."""

import os
import socket
import tempfile
from collections import Counter
from contextlib import ExitStack

from scenarios.harness.usage import ProcessUsage


def test_descriptors_are_counted_by_kind() -> None:
    usage = ProcessUsage(os.getpid())
    before = usage.descriptor_kinds
    assert before.total() <= usage.descriptors
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted, _ = listener.accept()
        for end in (accepted, *socket.socketpair()):
            stack.enter_context(end)
        stack.enter_context(tempfile.TemporaryFile())
        stack.callback(os.close, os.memfd_create("some memory"))
        for end in os.pipe():
            stack.callback(os.close, end)
        more = usage.descriptor_kinds
        more.subtract(before)
        assert more == Counter(connection=3, socket=2, file=1, memory=1, other=2)
        accepted.close()
        assert usage.descriptor_kinds["connection"] == before["connection"] + 2
        assert client.fileno() >= 0
    assert usage.descriptor_kinds == before
