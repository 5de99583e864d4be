"""HTTP clients attack a real seed with a gateway: how much memory it uses meanwhile and afterwards."""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from scenarios.harness.swarm import swarm_in
from scenarios.harness.usage import ProcessUsage

pytestmark = [pytest.mark.slow, pytest.mark.alone]

CLIENTS = 100
BODY = 8 << 20
ALLOWED = 64 << 20
"""How much the memory may grow during the attack, in bytes; half of it may remain afterwards."""
KEY = "sesame"


class Watch:
    """Records the peak memory of the seed and the gateway together while the block runs."""

    def __init__(self, *pids: int) -> None:
        self._pids, self._over = pids, threading.Event()
        self.before = self.peak = self.now()

    def now(self) -> int:
        return sum(ProcessUsage(pid).rss_bytes for pid in self._pids)

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.peak = max(self.peak, self.now())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def connect(port: int, source: str = "127.0.0.1", within_s: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), within_s, (source, 0))


def ask(port: int, key: str, body: bytes, source: str = "127.0.0.1") -> str:
    """Return the status of the answer to one request, or "closed" if there was none."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        with connect(port, source) as sock:
            sock.sendall(head.encode())
            with contextlib.suppress(OSError):  # it was answered early, and the answer can still be read
                sock.sendall(body)
            answer_text = sock.recv(4096).decode()
    except OSError:
        return "closed"
    return answer_text.split(" ", 2)[1] if answer_text else "closed"


def at_once(clients: int, work: Callable[[int], str]) -> Counter[str]:
    answers: Counter[str] = Counter()

    def one(i: int) -> None:
        answers[work(i)] += 1

    threads = [threading.Thread(target=one, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_gateway_uses_little_memory_and_frees_it(tmp_path: Path):
    """100 clients send 8 MiB each without the key, then as many with it; then silent clients connect from many
    addresses."""
    with swarm_in(tmp_path) as swarm:
        swarm.seed(None, "--raw-mb", "1")
        seed = swarm.running["seed"]
        home = {"SWARM_HOME": str(swarm.home("seed"))}
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--api-key", KEY, "--json", **home)
        swarm.until_logged("gateway", '"url"')
        pids = seed.pid, swarm.running["gateway"].pid
        port = int(json.loads((swarm.folder / "gateway.log").read_text())["url"].split(":")[2].removesuffix("/v1"))
        body = b" " * BODY
        for key in ("wrong", KEY):  # what the first requests load is no cost of the others
            ask(port, key, body)

        with Watch(*pids) as stranger:
            answers = at_once(CLIENTS, lambda i: ask(port, "wrong", body))
        print(f"without the key: {answers}, {stranger.before >> 20} MiB before, {stranger.peak >> 20} at most")
        assert set(answers) <= {"401", "closed"}
        assert stranger.peak - stranger.before < ALLOWED // 4

        with Watch(*pids) as client:
            answers = at_once(CLIENTS, lambda i: ask(port, KEY, body))
        time.sleep(1.0)
        after = client.now()
        print(f"with it: {answers}, {client.before >> 20} MiB before, {client.peak >> 20} at most, {after >> 20} after")
        assert set(answers) <= {"503", "429", "closed"}, "there are no nodes"
        assert answers["503"] > 0
        assert client.peak - client.before < 2 * ALLOWED
        assert after - client.before < ALLOWED // 2

        silent = [connect(port, f"127.0.1.{i % 16 + 1}") for i in range(640)]
        began = time.monotonic()
        assert ask(port, KEY, b"{}", "127.0.9.9") == "503"
        print(f"with 640 silent connections from 16 addresses an answer took {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < 10.0
        for sock in silent:
            sock.close()
        assert swarm.state("seed")["role"] == "seed"
