"""The emulator's delays, rates, losses and firewalls; and no process is left when its driver ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from codec.errors import UsageError
from scenarios.emulator.network import Host, Network
from scenarios.harness.processes import next_line

pytestmark = [pytest.mark.wan, pytest.mark.alone]

SERVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 4701)) as server:
    print("up", flush=True)
    while True:
        client, address = server.accept()
        got = 0
        while data := client.recv(1 << 20):
            if got == 0:
                client.sendall(data[:1])
            got += len(data)
        client.sendall(b".")
        client.close()
        print(got, *address, flush=True)
"""
DIAL = """
import socket, sys, time
host, port, length, bind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
start = time.monotonic()
try:
    client = socket.create_connection((host, port), 2, ("", bind))
except OSError as error:
    print(type(error).__name__)
    raise SystemExit
opened = time.monotonic() - start
client.sendall(b"x")
client.recv(1)
answered = time.monotonic() - start - opened
start = time.monotonic()
for _ in range(length >> 16):
    client.sendall(bytes(1 << 16))
client.shutdown(socket.SHUT_WR)
client.recv(1)
print(opened, answered, time.monotonic() - start)
"""


def serve(host: Host) -> "subprocess.Popen[str]":
    server = host.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert next_line(server).split() == ["up"]
    return server


def dial(host: Host, address: str, port: int = 4701, length: int = 0, bind: int = 0) -> list[str]:
    command = [sys.executable, "-c", DIAL, address, str(port), str(length), str(bind)]
    return host.run(command, stdout=subprocess.PIPE, text=True, timeout=30).stdout.split()


def test_delays_by_region_and_rates() -> None:
    net = Network(rtt_ms=20, between_ms=100)
    a = net.host(up_mbit=80, region="eu")
    b = net.host(region="eu")
    c = net.host(region="us", delay_ms=15)
    with net:
        serve(b), serve(c)
        opened_s, answered_s, _ = map(float, dial(a, b.address))
        assert 0.02 <= opened_s < 0.12  # a busy machine is slow; the other region is at 0.13 s
        assert 0.02 <= answered_s < 0.12
        opened_s, *_ = map(float, dial(a, c.address))
        assert 0.13 <= opened_s < 0.18  # 100 ms between the regions, and twice 15 ms for the far host's access link
        *_, seconds = map(float, dial(a, b.address, length=10 << 20))
        assert 10 * 8 * 1.048576 / 80 <= seconds < 1.6
        assert a.sums.sent_bytes > 10 << 20
        assert b.sums.received_bytes >= a.sums.sent_bytes - 10_000
        a.set(up_mbit=800)
        *_, faster_s = map(float, dial(a, b.address, length=10 << 20))
        assert faster_s < seconds / 2


def test_losses_and_cuts() -> None:
    net = Network(rtt_ms=5)
    a, b = net.host(loss=0.02), net.host()
    with net:
        serve(b)
        dial(a, b.address, length=8 << 20)
        packets = a.sums.sent_packets
        assert packets > 900  # each alone: MTU 9000
        assert 0.008 < a.sums.losses / packets < 0.04
        b.cut()
        assert dial(a, b.address) == ["TimeoutError"]
        b.cut(False)
        assert len(dial(a, b.address)) == 3


def test_firewalls_admit_the_expected_connections() -> None:
    net = Network(rtt_ms=5)
    free = net.host("free")
    shut = net.host("shut", firewall="in")
    home = net.host("home", firewall="nat", forward={30001: 4701})
    maze = net.host("maze", firewall="symmetric")
    with net:
        outside, inside = serve(free), serve(home)
        serve(shut)
        assert dial(free, shut.address) == ["TimeoutError"]
        assert dial(free, home.address) == ["TimeoutError"]
        assert len(dial(free, home.address, 30001, 1 << 20)) == 3
        assert next_line(inside).split()[:2] == [str(1 + (1 << 20)), free.address]
        assert shut.sums.refused > 0
        for host, keeps_port in ((shut, True), (home, True), (maze, False)):
            assert len(dial(host, free.address, length=1 << 20, bind=5001)) == 3
            length, address, port = next_line(outside).split()
            assert (length, address) == (
                str(1 + (1 << 20)),
                host.address,
            )  # the bytes arrived, so the checksums were right
            assert (port == "5001") is keeps_port


DRIVER = """
import subprocess, sys, time
from scenarios.emulator.network import Network
net = Network(rtt_ms=10)
a, b = net.host(), net.host()
with net:
    a.popen(["bash", "-c", "bash -c 'while :; do sleep 1; done' " + sys.argv[1] + "; true", sys.argv[1]])
    print(net.wire_pid, flush=True)
    time.sleep(1000)
"""


def running(word: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            command = Path("/proc", entry, "cmdline").read_bytes() if entry.isdigit() else b""
        except OSError:
            continue
        if word.encode() in command:
            found.append(int(entry))
    return found


def until_none(word: str) -> bool:
    for _ in range(100):
        if not running(word):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("also_the_wire", [False, True])
def test_a_killed_driver_leaves_nothing(tmp_path: Path, also_the_wire: bool) -> None:
    word = f"marked-{os.getpid()}-{also_the_wire}"
    with subprocess.Popen([sys.executable, "-c", DRIVER, word], stdout=subprocess.PIPE, text=True) as driver:
        wire = int(*next_line(driver).split())
        while len(running(word)) < 3:
            time.sleep(0.05)
        if also_the_wire:
            os.kill(wire, signal.SIGSTOP)  # so that it cannot act before it dies
        driver.kill()
        if also_the_wire:
            os.kill(wire, signal.SIGKILL)
    if also_the_wire:
        assert running(word)  # no process was left to end them
        net = Network()
        net.host()
        with net:
            pass
    assert until_none(word)
    assert until_none(f'scenarios.emulator.network.wire\0{{"driver": {driver.pid}')


def test_without_root_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    net = Network()
    with pytest.raises(UsageError, match="Add a host"), net:
        pass
    net.host()
    with pytest.raises(UsageError, match="needs root"), net:
        pass


def test_a_process_ends_with_the_network() -> None:
    net = Network()
    host = net.host()
    with net:
        process = host.popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(UsageError, match="is not up"):
        host.popen(["true"])
