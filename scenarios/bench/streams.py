"""Measures how long a token takes from the engine to a client of a stream.

    python -m scenarios.bench.streams --streams 64 --tokens 64 --rate 30

One process has the front, the gateway, the ledger, one node's worker, and an engine that draws a token of each sequence
at a fixed rate; another one has the clients, which read over loopback. So the time is that of all software on the way
without a network, of which a round trip comes on top. The target is 20 ms for the first token.
"""

import gc
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import trio

from codec.sign import Key
from node.cli.lifetime import GARBAGE
from node.engines.base import ABILITIES, JUDGES, Completion, DrawnTokens, Prompt, SamplingParams, Span, Version
from node.engines.host import Commitment
from node.engines.room import NO_ROOM_TOLD
from node.gateway import Gateway
from node.gateway.front.front import Front
from node.gateway.front.messages import ToSeed
from node.http.server import serve
from node.ipc.async_channel import AsyncChannel
from node.ledger.book import Book
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.state import Head
from node.member.pace import Pace
from node.member.worker import NodeWorker
from node.settings.config import GatewayConfig
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["main", "measure"]

ROOT: Final = bytes(32)
_CLIENTS: Final = ["--as-clients"]
"""What the process of the clients is started with."""
WITHIN_MS: Final = 20.0
"""The target for the first token."""


class SteadyEngine:
    """Draws a token of each sequence every `1 / rate` seconds, and notes when."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.version: Version = (0, 0)
        self.root = ROOT
        self.ready = self.preemptible = self.continuous_batching = True
        self.scores = False
        self.abilities, self.kind = ABILITIES - {JUDGES}, "steady"
        self.room = NO_ROOM_TOLD
        self.adapters: dict[str, Version] = {}
        self.drawn_at: dict[tuple[int, int], float] = {}
        """By the first token of the prompt and the number of the token: `time.perf_counter`."""

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()

    wait_up = wait_ready

    def lacks(self, version: Version) -> bool:
        return self.version < version

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Any = None,
        adapter: str = "",
        draws: Any = None,
    ) -> tuple[list[Completion], float]:
        (prompt,) = prompts
        for number in range(sampling.max_tokens):
            await trio.sleep(1 / self.rate)
            self.drawn_at[prompt.token_ids[0], number] = time.perf_counter()
            if draws is not None:
                draws(0, DrawnTokens(number, (7,), (-0.5,), self.version))
        count = sampling.max_tokens
        return [Completion((7,) * count, (-0.5,) * count, "length", (Span(self.version, 0, count),))], count / self.rate

    async def stage(self, patch_fd: int, version: Version) -> float:
        raise AssertionError("no version is published")

    async def commit(self, version: Version, root: bytes) -> Commitment:
        raise AssertionError("no version is published")


async def _measure(streams: int, tokens: int, rate: float) -> tuple[list[float], list[float]]:
    """(of first tokens, of all tokens): seconds from the engine to the client."""
    engine = SteadyEngine(rate)
    first: list[float] = []
    every: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        book = Book(Path(folder) / "ledger.sqlite")
        ledger = book.restore(Settings(), Head(0, 0, ROOT), trio.current_time())
        key = Key(bytes([1]) * 32)
        workers: list[NodeWorker] = []

        async def to_node(node: bytes, body: bytes) -> None:
            workers[0].hear(body)

        service = LedgerService(ledger, book, to_node)

        async def to_seed(body: bytes) -> None:
            service.hear(key.public, body)

        async with trio.open_nursery() as nursery:
            workers.append(
                NodeWorker(key, cast(Any, engine), to_seed, Pace(self_test_tokens=0, batch=streams, capacity=streams))
            )
            await nursery.start(service.run)
            await nursery.start(workers[0].run)
            ours, theirs = socket.socketpair()
            front, channel = Front(), AsyncChannel.adopt(theirs, ToSeed)
            gateway = Gateway(service, dict, lambda: (0, 0), GatewayConfig(at="127.0.0.1:1"), front=channel)
            await nursery.start(gateway.run)
            nursery.start_soon(front.serve_seed, ours)
            url = f"http://127.0.0.1:{await nursery.start(serve, front, '127.0.0.1', 0)}/v1"
            while not service.capacity:  # noqa: ASYNC110 - no event says that the node has asked
                await trio.sleep(0.05)
            command = [sys.executable, "-m", "scenarios.bench.streams", *_CLIENTS, url, str(streams), str(tokens)]
            clients = await trio.run_process(command, capture_stdout=True)
            nursery.cancel_scope.cancel()
        book.close()
    for i, times in enumerate(msgspec.json.decode(clients.stdout, type=list[list[float]])):
        took = [at - engine.drawn_at[i + 1, count] for count, at in enumerate(times)]
        first.append(took[0])
        every += took
    return first, every


async def _read_all(url: str, streams: int, tokens: int) -> list[list[float]]:
    """When each token of each stream came: `time.perf_counter`, which has the same origin in all processes here."""
    came: list[list[float]] = [[] for _ in range(streams)]

    async def read(i: int) -> None:
        body = {"prompt": [i + 1, 2, 3], "max_tokens": tokens, "stream": True, "ignore_eos": True}
        async for choice in _events(url, body):
            came[i] += [time.perf_counter()] * len(choice["token_ids"])
        assert len(came[i]) == tokens, f"{len(came[i])} tokens of {tokens}"

    async with trio.open_nursery() as nursery:
        for i in range(streams):
            nursery.start_soon(read, i)
    return came


async def _events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The choices of the events of a stream."""
    host, port = url.removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(head.encode() + b"\r\n" + data)
        rest = b""
        while True:
            part = await stream.receive_some()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "choices" in event, event
                    for choice in event["choices"]:
                        yield choice
            assert part, "the gateway ended a stream"


def main() -> int:
    if sys.argv[1:2] == _CLIENTS:
        url, streams, tokens = sys.argv[2:]
        print(json.dumps(trio.run(_read_all, url, int(streams), int(tokens))))
        return 0
    parser = json_parser(__doc__)
    parser.add_argument("--streams", type=int, default=64, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second of each")
    options = parser.parse_args()
    began_s = time.process_time()
    first, every = measure(options.streams, options.tokens, options.rate)
    cpu_us = 1e6 * (time.process_time() - began_s) / len(every)
    rows = {name: _spread_ms(times) for name, times in (("first token", first), ("all tokens", every))}
    if options.json:
        print(json.dumps({**rows, "cpu_us": cpu_us}))
    else:
        for name, (median, late) in rows.items():
            print(f"{name}: median {median:.1f} ms, 99 % within {late:.1f} ms")
        print(f"CPU time of engine, node, seed and gateway together: {cpu_us:.0f} microseconds a token")
    return 0 if rows["first token"][0] <= WITHIN_MS else 1


def measure(streams: int, tokens: int, rate: float) -> tuple[list[float], list[float]]:
    """Return (of first tokens, of all tokens) the seconds from the engine to the client. `rate`: tokens per second of
    each stream."""
    gc.freeze()  # as in the processes of swarm-node
    gc.set_threshold(GARBAGE)
    return trio.run(_measure, streams, tokens, rate)


def _spread_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    ms = sorted(1000 * each for each in seconds)
    return statistics.median(ms), ms[int(0.99 * (len(ms) - 1))]


if __name__ == "__main__":
    run_as_program(main)
