"""Measures what adapters cost a vLLM, and what updates of adapters cost the sequences that run.

    python -m scenarios.bench.adapters [--adapters 8] [--rank 16] [--updates 40] [--hidden 256] [--json]

One sequence of each adapter and one of the base run on one vLLM, while the adapters get new versions in turn, a tenth
of the weights each. The base's sequence is read as a stream, token by token: `others_gap_ms` are the gaps between two
of its tokens in which a switch fell, and `quiet_gap_ms` those in which none fell. `skipped_steps` are the shares of
both that are as long as two steps, by the median of the quiet ones: a switch that takes no step from other sequences
does not add to it. `switch_ms` is the time between two steps that a switch took, which is the whole pause of the
adapter's own sequences. `stage_ms` is the time to prepare and prove a version, beside the steps. After each switch the
live bits are read back again, and `live_bits_proven` counts those that have the adapter's root; no gap is taken from
that time. Tokens a second are of all sequences together, with and without adapters.
"""

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from codec import Checkpoint, Replica
from codec.adapter import AdapterSlots
from node.engines.base import Prompt, SamplingParams
from scenarios.engines.adapter_models import MadeAdapter, make_adapter
from scenarios.engines.engine_bench import WITHIN_S, Bench, bench
from scenarios.engines.engine_models import make_qwen3
from scenarios.engines.vllm_environment import vllm_python

__all__ = ["main", "measure"]

TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT: Final = tuple(range(3, 35))
TOKENS: Final = 200
"""Of each sequence whose rate is measured."""
SHARE: Final = 0.1
"""Of an adapter's weights that change in an update."""


def measure(count: int, rank: int, updates: int, hidden: int, threads: int | None) -> dict[str, Any]:
    """Run all parts on one model. Raises `EngineError` when vLLM fails."""
    python = vllm_python()
    with tempfile.TemporaryDirectory(prefix="bench-adapters-") as name:
        folder = make_qwen3(Path(name) / "model", hidden=hidden, wide=3 * hidden)
        base = Replica.from_checkpoint(Checkpoint.open(folder)).layout
        slots = AdapterSlots.reserve(base, count, rank)
        more = ("--max-model-len", "1024", "--max-num-seqs", str(count + 1))
        with bench(folder, Path(name) / "plain", python, threads=threads, more=more) as live:
            plain = _rate(live, [""] * count)
        with bench(folder, Path(name) / "adapters", python, threads=threads, more=more, slots=slots) as live:
            made = [make_adapter(base, slots, f"a{i}", targets=TARGETS, rank=rank, seed=i) for i in range(count)]
            for slot, adapter in enumerate(made):
                live.set_adapter(adapter, slot, slot + 1)
            rates = {
                "base": _rate(live, [""] * count),
                "one adapter": _rate(live, ["a0"] * count),
                "each its own": _rate(live, [adapter.name for adapter in made]),
            }
            found = _update(live, made, updates)
    return {
        "scenario": "adapters",
        "adapters": count,
        "rank": rank,
        "elements": slots.elements,
        "updates": updates,
        "tokens_per_s_without_room": round(plain, 1),
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        **found,
    }


def _rate(live: Bench, names: Sequence[str]) -> float:
    """Tokens a second of one sequence for each of `names`, all at once."""
    sampling = SamplingParams(TOKENS, temperature=0.0)
    for tokens in (8, TOKENS):  # the first ones warm up
        started = time.perf_counter()
        sampling = SamplingParams(tokens, temperature=0.0)
        flights = [live.begin([Prompt(PROMPT, i)], sampling, name) for i, name in enumerate(names)]
        for flight in flights:
            flight.result(WITHIN_S)
    return len(names) * TOKENS / (time.perf_counter() - started)


class _Stream:
    """A sequence of the base that runs until `stop`, and the time of each of its tokens."""

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        self._netloc, self._stopped = urlsplit(url).netloc, False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        body = {"model": "policy", "prompt": list(PROMPT), "max_tokens": 900, "ignore_eos": True, "stream": True}
        while not self._stopped:
            connection = http.client.HTTPConnection(self._netloc, timeout=WITHIN_S)
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())
                if self._stopped:
                    break
            self.times.append(float("nan"))  # a gap between two sequences is none within one
            connection.close()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join(WITHIN_S)

    def gaps(self) -> Iterator[tuple[float, float]]:
        """(begin, end) of the time between any two tokens."""
        for begin, end in zip(self.times, self.times[1:], strict=False):
            if end > begin:  # false for NaN
                yield begin, end


def _update(live: Bench, made: list[MadeAdapter], updates: int) -> dict[str, Any]:
    """Update the adapters in turn while all sequences run."""
    stream = _Stream(live.url)
    flights = [live.begin([Prompt(PROMPT, i)], SamplingParams(900), adapter.name) for i, adapter in enumerate(made)]
    while len(stream.times) < 20:
        time.sleep(0.05)
    staged, switched, times, proofs, proven = [], [], [], [], 0
    for update in range(updates):
        slot = update % len(made)
        if flights[slot].done():
            flights[slot] = live.begin([Prompt(PROMPT, update)], SamplingParams(900), made[slot].name)
        made[slot] = made[slot].step(update, SHARE)
        with made[slot].given(slot, (0, 1000 + update)) as given:
            started = time.perf_counter()
            live.engine.stage_adapter(given)
        began = time.perf_counter()
        switched.append(live.engine.switch_adapter(slot))
        times.append((began, time.perf_counter()))
        staged.append(began - started)
        time.sleep(0.2)
        began = time.perf_counter()
        proven += live.engine.adapter_root(slot) == made[slot].root(slot)
        proofs.append((began, time.perf_counter()))
    stream.stop()
    gaps = [gap for gap in stream.gaps() if not _overlaps(gap, proofs)]
    hit = [end - begin for begin, end in gaps if _overlaps((begin, end), times)]
    quiet = [end - begin for begin, end in gaps if not _overlaps((begin, end), times)]
    two_steps = 2 * statistics.median(quiet)
    for flight in flights:
        flight.result(WITHIN_S)
    return {
        "live_bits_proven": proven,
        "stage_ms": _spread(staged),
        "switch_ms": _spread(switched),
        "others_gap_ms": _spread(hit),
        "quiet_gap_ms": _spread(quiet),
        "skipped_steps": {
            name: round(sum(gap >= two_steps for gap in of) / max(1, len(of)), 3)
            for name, of in (("others", hit), ("quiet", quiet))
        },
    }


def _overlaps(gap: tuple[float, float], spans: Sequence[tuple[float, float]]) -> bool:
    return any(begin < gap[1] and gap[0] < end for begin, end in spans)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(1e3 * value for value in seconds)
    at95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": round(statistics.median(ordered), 3), "p95": round(at95, 3), "most": round(ordered[-1], 3)}


def main(arguments: list[str] | None = None) -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="scenarios.bench.adapters", description=__doc__)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model; it has four layers")
    parser.add_argument("--threads", type=int, help="CPU threads of vLLM")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # the driver's log
        found = measure(given.adapters, given.rank, given.updates, given.hidden, given.threads)
    print(json.dumps(found) if given.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
