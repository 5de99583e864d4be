"""One SGLang under the driver of a node, with a replica that a test or scenario advances."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from codec import Checkpoint, Replica
from node.engines.base import EngineError
from node.engines.interface import SharedReplica
from node.engines.sglang.engine import SglangEngine, SglangPolicy
from node.engines.sglang.front import speak_for
from node.engines.sglang.http import Api
from node.engines.sglang.installed import installed
from node.engines.sglang.server import Server, ServerOptions
from node.engines.vllm.links import Listener
from scenarios.engines.engine_bench import Bench, free_port, stop

__all__ = ["bench"]

SMALL: Final = ("--max-running-requests", "8", "--context-length", "2048")
"""SGLang's flags for small test models."""


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
        installed(python), files, home / "sglang.log", ServerOptions(port, ranks, threads, None, tuple(more))
    )
    url = f"http://127.0.0.1:{port}"
    try:
        server.wait_ready()
        speak_for(Api(url), listener.path, fill=True)
        engine.attach_replica(SharedReplica(replica, replica.seal_for_readers(), files))
        if engine.reload_replica((0, 0), replica.root) != replica.root:
            raise EngineError("the engine was not filled")
        yield Bench(engine, replica, checkpoint, url, server.pid, lost)
    finally:
        engine.close()
        stop(server.pid, server)
