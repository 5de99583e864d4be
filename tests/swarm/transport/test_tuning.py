"""Socket options: set where the system allows them, left alone where it does not."""

import socket
import struct
from pathlib import Path

import pytest

from swarm.transport.tuning import BBR, awaken, tune

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@pytest.mark.skipif(not ALLOWED.exists(), reason="needs Linux")
def test_bbr_where_it_is_allowed() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        used = tune(sock)
        assert (used == "bbr") or BBR.decode() not in ALLOWED.read_text().split()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class Refusing:
    """A kernel that refuses every option."""

    def setsockopt(self, *_: object) -> None:
        raise PermissionError

    def getsockopt(self, *_: object) -> bytes:
        raise PermissionError


def test_refused_options_are_left_alone() -> None:
    assert tune(Refusing()) == ""
    awaken(Refusing())


class Kernel:
    """A kernel that reports BBR's state and records which algorithm is chosen."""

    def __init__(self, gain: int) -> None:
        self.info = struct.pack("5I", 1000, 0, 100_000, gain, gain)
        self.chosen: list[object] = []

    def getsockopt(self, *_: object) -> bytes:
        return self.info

    def setsockopt(self, level: int, option: int, value: object) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.chosen.append(value)


def test_only_a_connection_in_bbrs_startup_phase_starts_again() -> None:
    learning, cruising, empty = Kernel(739), Kernel(320), Kernel(739)
    empty.info = b""
    for kernel in (learning, cruising, empty):
        awaken(kernel)
    assert (learning.chosen, cruising.chosen, empty.chosen) == ([b"reno", BBR], [], [])


@pytest.mark.skipif(not ALLOWED.exists(), reason="needs Linux")
def test_a_connection_goes_on_after_it_was_awakened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            used = tune(near)
            for word in (b"before", b"after"):
                near.sendall(word)
                assert far.recv(100) == word
                awaken(near)
                assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode() == used
