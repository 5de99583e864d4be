"""Compares the gateway's tokens per second with those of the server of its only engine, a vLLM, on the same machine.

    python -m scenarios.bench.gateway_overhead --in-flight 64 --tokens 128 --hidden 1024 --layers 12

A seed, its gateway and a node with vLLM run on this machine. Clients read streams of vLLM's own endpoint and of the
gateway in turns, so that a slow minute of the machine hits both. On a machine with few cores the processes of the swarm
also take cores from the engine, which a GPU would not notice. The target is 95 %.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import trio

from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.processes import free_port
from scenarios.harness.swarm import LOOPBACK, swarm_in

__all__ = ["main", "measure"]

READY_WITHIN_S: Final = 600.0
ROUND_WITHIN_S: Final = 900.0
REACH: Final = 0.95
"""The target for the share."""


def measure(
    folder: Path, *, in_flight: int, tokens: int, rounds: int, hidden: int, layers: int
) -> dict[str, list[float]]:
    """Tokens per second of each round: of `engine` and of `gateway`."""
    from scenarios.engines.engine_models import make_qwen3
    from scenarios.engines.vllm_environment import vllm_python

    base = make_qwen3(folder / "base", hidden=hidden, layers=layers, wide=3 * hidden)
    port = free_port()
    with swarm_in(folder / "swarm") as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", "1")
        more = (f"--max-num-seqs={in_flight}", "--max-model-len=1024")
        swarm.start(
            "box", "join", ticket, "--model", str(base), *LOOPBACK, "--engine", "vllm",
            "--vllm-python", str(vllm_python()), "--engine-port", str(port),
            *(f"--vllm-arg={flag}" for flag in more),
        )  # fmt: skip
        swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", SWARM_HOME=str(swarm.home("seed")))
        swarm.until(
            "seed",
            lambda state: any(node["capacity"] > 0 for node in state["work"]["nodes"].values()),
            within_s=READY_WITHIN_S,
        )
        gateway = int(json.loads(swarm.log("gateway"))["url"].split(":")[2].removesuffix("/v1"))
        ends = {"engine": (port, str(base)), "gateway": (gateway, "policy")}
        found: dict[str, list[float]] = {name: [] for name in ends}
        for number in range(rounds + 1):
            for name, (at, model) in ends.items():
                rate = trio.run(_round, at, model, in_flight, tokens, number)
                if number:  # the first round warms both up
                    found[name].append(rate)
        return found


async def _round(port: int, model: str, in_flight: int, tokens: int, number: int) -> float:
    """Tokens per second of `in_flight` streams that begin together."""
    began = time.monotonic()
    with trio.fail_after(ROUND_WITHIN_S):
        async with trio.open_nursery() as nursery:
            for i in range(in_flight):
                nursery.start_soon(_stream, port, model, [3 + (7 * i + number) % 200] * 16, tokens)
    return in_flight * tokens / (time.monotonic() - began)


async def _stream(port: int, model: str, prompt: list[int], tokens: int) -> None:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0}
    data = json.dumps(body | {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = b""
        async for part in stream:
            answer += part
    usage = answer.rpartition(b'"completion_tokens":')[2]
    count = int(usage.partition(b",")[0].strip() or b"0")
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
