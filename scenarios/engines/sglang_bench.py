"""One SGLang under the driver of a node, with a replica that a test or scenario advances; and one that a user runs."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from codec import Checkpoint, Replica
from node.engines.base import EngineError
from node.engines.interface import SharedReplica
from node.engines.server_process import ServerProcess
from node.engines.sglang.engine import SglangEngine, SglangPolicy
from node.engines.sglang.front import speak_for
from node.engines.sglang.http import Api
from node.engines.sglang.installed import installed
from node.engines.sglang.plugin.swarm_sglang.calls import LOADER, ROWS_ALIKE
from node.engines.sglang.server import CPU_FLAGS, Server, ServerOptions, environment
from node.engines.vllm.links import Listener
from node.host.port import free_port
from scenarios.engines.engine_bench import WITHIN_S, Bench, stop

__all__ = ["FOLLOWS", "SMALL", "bench", "users_greedy", "users_own"]

SMALL: Final = ("--max-running-requests", "8", "--context-length", "2048")
"""SGLang's flags for small test models."""
FOLLOWS: Final = ("--custom-weight-loader", LOADER, "--disable-overlap-schedule", "--incremental-streaming-output")
"""The flags with which a user's SGLang can follow a swarm, as docs/sglang.md has them."""


@contextlib.contextmanager
def bench(
    folder: Path,
    home: Path,
    python: Path,
    *,
    ranks: int = 1,
    threads: int | None = None,
    more: Sequence[str] = SMALL,
    policy: SglangPolicy = "continue",
) -> Iterator[Bench]:
    """Start an SGLang and load the weights of `folder` as version 0. Raises `EngineError` if that fails."""
    checkpoint = Checkpoint.open(folder)
    replica = Replica.from_checkpoint(checkpoint)
    files = home / "files"
    files.mkdir(parents=True, exist_ok=True)
    for name, data in checkpoint.files.items():
        (files / name).write_bytes(data)
    lost: list[str] = []
    listener = Listener(home / "sglang.sock", lost.append, SglangEngine.program)
    engine = SglangEngine(listener, policy)
    port = free_port()
    server = Server(
        installed(python), files, home / "sglang.log", ServerOptions(port, ranks, threads, flags=tuple(more))
    )
    url = f"http://127.0.0.1:{port}"
    try:
        server.wait_ready()
        speak_for(Api(url), listener.path, fill=True, alike=ROWS_ALIKE in more)
        engine.attach_replica(SharedReplica(replica, replica.seal_for_readers(), files))
        if engine.reload_replica((0, 0), replica.root) != replica.root:
            raise EngineError("the engine was not filled")
        yield Bench(engine, replica, checkpoint, url, server.pid, lost)
    finally:
        engine.close()
        stop(server.pid, server)


class _UsersServer(ServerProcess):
    program = "SGLang"


@contextlib.contextmanager
def users_own(
    folder: Path, log: Path, python: Path, *, ranks: int = 1, threads: int | None = None, more: Sequence[str] = SMALL
) -> Iterator[str]:
    """The URL of an SGLang that its user runs and that loads `folder` itself.

    With `FOLLOWS` in `more` it can follow a swarm; without, the plugin changes nothing of it. Raises `UsageError` if it
    does not start.
    """
    cpu, port = installed(python).cpu, free_port()
    command = [str(python), "-m", "swarm_sglang.serve", "--model-path", str(folder), "--port", str(port)]
    command += ["--tp-size", str(ranks), "--skip-server-warmup", "--sleep-on-idle", *(CPU_FLAGS if cpu else ()), *more]
    server = _UsersServer(command, environment(os.environ, ranks, cpu, threads), port, log)
    try:
        server.wait_ready()
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(server.pid, server)


def users_greedy(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
    """As `Bench.greedy`, asked of SGLang's own route. Raises `EngineError`."""
    answers = []
    for prompt in prompts:
        drawing = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": drawing, "return_logprob": True, "logprob_start_len": -1}
        told = Api(url).post("/generate", body, WITHIN_S)["meta_info"]["output_token_logprobs"]
        answers.append(([int(entry[1]) for entry in told], [float(entry[0]) for entry in told]))
    return answers
