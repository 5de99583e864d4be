"""Measures the cost of updates in a running engine: pauses, gaps between tokens, speed; and that of vLLM's loaders."""

import http.client
import json
import os
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from codec import read_patch
from node.engines.base import Prompt, SamplingParams
from node.engines.interface import WeightPatch
from scenarios.engines.engine_bench import Bench
from scenarios.engines.engine_models import step_of

__all__ = ["cost"]

STREAMS: Final = 4
WINDOW_S: Final = 6.0
"""Length of the windows that alternate between generating with and without staging."""
WINDOWS: Final = 3


class _Streams:
    """Sends requests to the OpenAI endpoint from `STREAMS` threads, and records when each token arrived."""

    def __init__(self, url: str) -> None:
        self._netloc = urlsplit(url).netloc
        self._stop = threading.Event()
        self.came: list[list[float]] = [[] for _ in range(STREAMS)]
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self, i: int) -> None:
        while not self._stop.is_set():
            connection = http.client.HTTPConnection(self._netloc, timeout=120)
            body = {"model": "policy", "prompt": [5 + i, 6, 7], "max_tokens": 400, "stream": True, "ignore_eos": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            while not self._stop.is_set() and (line := response.readline()):
                if line.startswith(b"data: {"):
                    self.came[i].append(time.perf_counter())
            connection.close()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10.0)

    def tokens(self, since: float, until: float) -> int:
        return sum(since <= at < until for stream in self.came for at in stream)

    def gaps(self, since: float, until: float) -> list[float]:
        """Return the gaps between consecutive tokens of a stream whose later token arrived in this interval."""
        return [b - a for stream in self.came for a, b in pairwise(stream) if since <= b < until]


def call(url: str, method: str, *arguments: str) -> float:
    """Call a probe (see `vllm_probe`) and return the largest answer of all ranks. Raises `RuntimeError`."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    body = json.dumps({"method": method, "args": list(arguments)})
    connection.request("POST", "/collective_rpc", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{method}: {answer[:300]!r}")
    return max(float(result) for result in json.loads(answer)["results"])


def cost(live: Bench, updates: int, home: Path) -> dict[str, Any]:
    """Return the costs of `updates` versions of 1 % while `STREAMS` streams run, and those of vLLM's own loaders."""
    live.generate([Prompt((1, 2, 3))], SamplingParams(max_tokens=8))
    fd = live.advance(step_of(live.replica, 1000))
    bare, sparse, reload_s, changed = _baselines(live, fd, home)
    live.engine.commit((0, live.version), live.replica.root)
    streams = _Streams(live.url)
    try:
        time.sleep(3.0)
        speed = _while_staging(live, streams)
        pauses, worst, usual, equal = _updates(live, streams, updates, bare)
    finally:
        streams.stop()
    pause, scatter = statistics.median(pauses), statistics.median(bare)
    return {
        "changed": changed,
        "pause_ms": round(1e3 * pause, 2),
        "pause_worst_ms": round(1e3 * max(pauses), 2),
        "bare_scatter_ms": round(1e3 * scatter, 2),
        "pause_over_bare": round(pause / scatter, 2),
        "usual_gap_ms": round(1e3 * usual, 1),
        "worst_gap_ms": round(1e3 * worst, 1),
        "worst_gap_over_allowed": round(worst / (2 * usual + pause), 2),
        "speed_loss_while_staging": round(speed, 3),
        "vllm_sparse_ms": round(1e3 * sparse, 1),
        "vllm_reload_ms": round(1e3 * reload_s, 1),
        "cost_updates": updates,
        "cost_bits_equal": equal,
    }


def _baselines(live: Bench, fd: int, home: Path) -> tuple[list[float], float, float, int]:
    """Stage the patch behind `fd` and time other ways to load it.

    Returns the seconds of bare scatters, of vLLM's sparse loader and of its full reload, and the number of changed
    elements. The patch stays staged; `fd` is closed.
    """
    file = home / "patch.npz"
    arrays: dict[str, Any] = {}
    for name, indices, bits in read_patch(fd):
        arrays["i:" + name] = np.concatenate([arrays.get("i:" + name, indices[:0]), indices])
        arrays["b:" + name] = np.concatenate([arrays.get("b:" + name, bits[:0]), bits])
        arrays["s:" + name] = np.array(live.replica.layout.tensor(name).shape)
    np.savez(file, **arrays)
    live.engine.stage_patch(WeightPatch(fd, (0, live.version)))
    os.close(fd)
    changed = int(call(live.url, "probe_keep"))
    bare = [call(live.url, "probe_bare") for _ in range(5)]
    sparse = min(call(live.url, "probe_sparse", str(file)) for _ in range(2))
    reload_s = min(call(live.url, "probe_reload") for _ in range(2))
    return bare, sparse, reload_s, changed


def _updates(live: Bench, streams: _Streams, updates: int, bare: list[float]) -> tuple[list[float], float, float, bool]:
    """Return the pauses, the worst gap around an update, the usual gap, and whether all live bits were equal."""
    pauses, worst, equal = [], 0.0, True
    usual: list[float] = []
    for v in range(updates):
        staged = step_of(live.replica, 2000 + v)
        time.sleep(1.0)
        began = time.perf_counter()
        usual += streams.gaps(began - 1.0, began)
        fd = live.advance(staged)
        started = time.perf_counter()
        live.engine.stage_patch(WeightPatch(fd, (0, live.version)))
        os.close(fd)
        worst = max([worst, *streams.gaps(started, time.perf_counter())])
        call(live.url, "probe_keep")  # sorts between two engine steps, which makes a gap that must not count
        time.sleep(0.5)
        started = time.perf_counter()
        pauses.append(live.engine.commit((0, live.version), live.replica.root))
        time.sleep(0.5)
        worst = max([worst, *streams.gaps(started, time.perf_counter())])
        bare.append(call(live.url, "probe_bare"))  # writes the same bits again, so nothing changes
        equal = equal and bool((live.engine.live_hashes() == live.replica.hashes).all())
    return pauses, worst, statistics.median(usual), equal


def _while_staging(live: Bench, streams: _Streams) -> float:
    """Return the relative loss of tokens while versions are staged back to back."""
    fd = live.advance(step_of(live.replica, 1500))
    with_it, without = 0, 0
    for _ in range(WINDOWS):
        started = time.perf_counter()
        time.sleep(WINDOW_S)
        without += streams.tokens(started, started + WINDOW_S)
        started = time.perf_counter()
        while time.perf_counter() < started + WINDOW_S:
            live.engine.stage_patch(WeightPatch(fd, (0, live.version)))
        with_it += streams.tokens(started, started + WINDOW_S)
    os.close(fd)
    live.engine.commit((0, live.version), live.replica.root)
    return 1 - with_it / max(1, without)
