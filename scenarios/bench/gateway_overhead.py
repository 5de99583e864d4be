"""Compares the gateway's tokens per second with those of the server of its only engine, a vLLM, on the same machine.

    python -m scenarios.bench.gateway_overhead --in-flight 64 --tokens 128 --hidden 1024 --layers 12

A seed, its gateway and a node with vLLM run on this machine. Clients read streams of vLLM's own endpoint and of the
gateway in turns, so that a slow minute of the machine hits both. On a machine with few cores the processes of the swarm
also take cores from the engine, which a GPU would not notice. The target is 95 %.
"""

import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import trio

from scenarios.engines.vllm_swarm import MODEL, ask, served
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["main", "measure"]

ROUND_WITHIN_S: Final = 900.0
USAGE: Final = re.compile(rb'"completion_tokens": ?([0-9]+)')
REACH: Final = 0.95
"""The target for the share."""


def measure(
    folder: Path, *, in_flight: int, tokens: int, rounds: int, hidden: int, layers: int
) -> dict[str, list[float]]:
    """Tokens per second of each round: of `engine` and of `gateway`."""
    from scenarios.engines.engine_models import make_qwen3

    base = make_qwen3(folder / "base", hidden=hidden, layers=layers, wide=3 * hidden)
    flags = (f"--max-num-seqs={in_flight}", "--max-model-len=1024")
    with served(folder / "swarm", base, 1, flags) as found:
        ends = {"engine": found.engines[0], "gateway": found.gateway}
        rates: dict[str, list[float]] = {name: [] for name in ends}
        for number in range(rounds + 1):
            for name, port in ends.items():
                rate = trio.run(_round, port, in_flight, tokens, number)
                if number:  # the first round warms both up, and tells the node how long sequences are
                    rates[name].append(rate)
        return rates


async def _round(port: int, in_flight: int, tokens: int, number: int) -> float:
    """Tokens per second of `in_flight` streams that begin together."""
    began = time.monotonic()
    with trio.fail_after(ROUND_WITHIN_S):
        async with trio.open_nursery() as nursery:
            for i in range(in_flight):
                nursery.start_soon(_stream, port, [3 + (7 * i + number) % 200] * 16, tokens)
    return in_flight * tokens / (time.monotonic() - began)


async def _stream(port: int, prompt: list[int], tokens: int) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0}
    more = {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    answer = await ask(port, "POST", "/v1/completions", body | more)
    counts = USAGE.findall(answer)
    count = int(counts[-1]) if counts else 0
    if count != tokens or b"[DONE]" not in answer:
        raise ValueError(f"a stream has {count} tokens of {tokens}: {answer[-300:]!r}")


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--in-flight", type=int, default=64, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--rounds", type=int, default=3, help="of each end, after one that does not count")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model")
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("in_flight", "tokens", "rounds", "hidden", "layers")}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), **sizes)
    share = statistics.median(found["gateway"]) / statistics.median(found["engine"])
    if options.json:
        print(json.dumps({**found, "share": share}))
    else:
        for name, rates in found.items():
            print(f"{name}: {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s")
        print(f"the gateway has {share:.1%} of the engine's tokens/s")
    return 0 if share >= REACH else 1


if __name__ == "__main__":
    run_as_program(main)
