"""Ports for servers that bind them later."""

import socket

import pytest

from codec.errors import UsageError
from node.host import port
from node.host.port import free_port


def test_a_free_port_can_be_bound_and_is_none_that_the_system_gives_to_connections() -> None:
    found = free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", found))
    assert found < 32768  # where Linux's default ip_local_port_range begins


def test_a_taken_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        taken = sock.getsockname()[1]
        monkeypatch.setattr(port, "NOT_EPHEMERAL", range(taken, taken + 1))
        monkeypatch.setattr(port, "TRIES", 1)
        with pytest.raises(UsageError, match=f"No port from {taken} to {taken}"):
            free_port()
