import socket
from pathlib import Path

import pytest

from swarm.transport.tuning import BBR, tune

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@pytest.mark.skipif(not ALLOWED.exists(), reason="needs Linux")
def test_bbr_where_it_is_allowed() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        used = tune(sock)
        assert (used == "bbr") or BBR.decode() not in ALLOWED.read_text().split()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class Refusing:
    """A kernel that lets nobody set anything."""

    def setsockopt(self, *_: object) -> None:
        raise PermissionError

    def getsockopt(self, *_: object) -> bytes:
        raise PermissionError


def test_what_is_refused_is_left() -> None:
    assert tune(Refusing()) == ""
