"""Measures how fast plain sockets and threads pass bytes down striped trees on this machine, with no check at all.

The origin sends each piece to one node in turn, and that node passes the piece to all other nodes. So the trees have
depth two, the origin sends one copy, and every uplink is used. Nothing is encrypted, hashed, credited or stored, and
no node leaves. The time that a real swarm takes beyond this one is the cost of those functions; the time that this one
takes beyond the bound is the cost of the machine and its emulated links.

    python -m scenarios.emulator.floor origin PAYLOAD_BYTES ADDRESS ...      (started by `pass_on`, as is `node`)
    python -m scenarios.emulator.floor node PAYLOAD_BYTES INDEX ADDRESS ...
"""

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scenarios.emulator.network import Network
from scenarios.emulator.real import QUEUE_MS, Node, bound_s
from scenarios.harness.processes import next_line
from scenarios.harness.usage import machine_cpu_s

__all__ = ["Floor", "main", "pass_on"]

PORT: Final = 4002
PIECE_BYTES: Final = 64 << 10
AHEAD: Final = 8
"""Pieces that may wait for one socket. A full queue makes the reader wait, which in turn makes the origin wait."""
PATIENCE_S: Final = 120.0
"""Timeout of each socket operation."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The result of one run. `copies`: bytes past the origin's uplink over `payload_bytes`; `busy`: share of CPU."""

    payload_bytes: int
    bound_s: float
    seconds: float
    copies: float
    busy: float


def pass_on(up_mbit: Sequence[float], origin_mbit: float, payload_bytes: int) -> Floor:
    """Send `payload_bytes` to nodes with these uplinks and measure until the last node has them all.

    Raises `ProcessFailed` when a process fails.
    """
    network = Network()
    origin = network.host("origin", up_mbit=origin_mbit, down_mbit=1000, queue_ms=QUEUE_MS)
    hosts = [network.host(f"node{i}", up_mbit=up, down_mbit=1000, queue_ms=QUEUE_MS) for i, up in enumerate(up_mbit)]
    command = [sys.executable, "-m", "scenarios.emulator.floor"]
    addresses = [host.address for host in hosts]
    with network:
        nodes = [
            host.popen(
                [*command, "node", str(payload_bytes), str(index), *addresses], stdout=subprocess.PIPE, text=True
            )
            for index, host in enumerate(hosts)
        ]
        for process in nodes:
            next_line(process, "listening", PATIENCE_S)
        sender = origin.popen(
            [*command, "origin", str(payload_bytes), *addresses],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        next_line(sender, "connected", PATIENCE_S)
        before, spent = origin.sums.sent_bytes, machine_cpu_s()
        assert sender.stdin is not None
        began = time.monotonic()
        print("go", file=sender.stdin, flush=True)
        held_at_s = [float(next_line(process, "had", PATIENCE_S)) for process in nodes]
        used, idle = (after - earlier for earlier, after in zip(spent, machine_cpu_s(), strict=True))
        copies = (origin.sums.sent_bytes - before) / payload_bytes
    bound = bound_s(payload_bytes, origin_mbit, [Node(up) for up in up_mbit])
    return Floor(payload_bytes, bound, max(held_at_s) - began, copies, used / (used + idle))


def _connect(address: str) -> socket.socket:
    sock = socket.create_connection((address, PORT), PATIENCE_S)
    sock.settimeout(PATIENCE_S)
    return sock


def _pump(sock: socket.socket, pieces: "queue.Queue[bytes | None]") -> None:
    while (piece := pieces.get()) is not None:
        sock.sendall(piece)
    sock.close()


def _origin(payload_bytes: int, addresses: Sequence[str]) -> None:
    queues: list[queue.Queue[bytes | None]] = [queue.Queue(AHEAD) for _ in addresses]
    pumps = [
        threading.Thread(target=_pump, args=(_connect(a), q)) for a, q in zip(addresses, queues, strict=True)
    ]  # fmt: skip
    for pump in pumps:
        pump.start()
    print("connected", flush=True)
    sys.stdin.readline()
    piece = bytes(PIECE_BYTES)
    for number in range(payload_bytes // PIECE_BYTES):
        queues[number % len(queues)].put(piece)
    for pieces in queues:
        pieces.put(None)
    for pump in pumps:
        pump.join()


class _Node:
    """Counts the bytes that it receives, and passes the origin's bytes on to all other nodes."""

    def __init__(self, payload_bytes: int, index: int, addresses: Sequence[str]) -> None:
        self._left = payload_bytes // PIECE_BYTES * PIECE_BYTES
        self._index = index
        self._addresses = addresses
        self._lock = threading.Lock()
        self.complete = threading.Event()

    def serve(self) -> None:
        with socket.create_server(("0.0.0.0", PORT)) as server:
            print("listening", flush=True)
            for _ in self._addresses:  # as many peers: the origin replaces this node
                client, (host, _port) = server.accept()
                client.settimeout(PATIENCE_S)
                handle = self._count if host in self._addresses else self._pass_on
                threading.Thread(target=handle, args=(client,)).start()
        self.complete.wait()
        print("had", time.monotonic(), flush=True)

    def _add_received(self, length: int) -> None:
        with self._lock:
            self._left -= length
            if self._left <= 0:
                self.complete.set()

    def _count(self, client: socket.socket) -> None:
        buffer = bytearray(4 * PIECE_BYTES)
        while length := client.recv_into(buffer):
            self._add_received(length)

    def _pass_on(self, client: socket.socket) -> None:
        others = [address for index, address in enumerate(self._addresses) if index != self._index]
        queues: list[queue.Queue[bytes | None]] = [queue.Queue(AHEAD) for _ in others]
        for address, pieces in zip(others, queues, strict=True):
            threading.Thread(target=_pump, args=(_connect(address), pieces)).start()
        while piece := client.recv(PIECE_BYTES, socket.MSG_WAITALL):
            self._add_received(len(piece))
            for pieces in queues:
                pieces.put(piece)
        for pieces in queues:
            pieces.put(None)


def main() -> None:
    kind, payload, *rest = sys.argv[1:]
    if kind == "origin":
        _origin(int(payload), rest)
    else:
        _Node(int(payload), int(rest[0]), rest[1:]).serve()


if __name__ == "__main__":
    main()
