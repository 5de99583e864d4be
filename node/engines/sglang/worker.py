"""SGLang's driver as an engine process: `python -m node.engines.sglang.worker --socket PATH --sglang-python PYTHON`.

It speaks the messages of `node.engines.messages` with the node, like any engine process, and requests of HTTP with an
SGLang, which it starts or attaches to (`--url`). When the node or the SGLang goes away, this process ends with
everything that it started, and the node starts it again.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn, get_args

from codec.errors import SwarmError, UsageError
from node.engines.device_plan import share_of
from node.engines.messages import FromNode
from node.engines.sglang.engine import SglangEngine, SglangPolicy
from node.engines.sglang.installed import installed
from node.engines.sglang.launch import RunningSglang, StartedSglang
from node.engines.sglang.server import ServerOptions
from node.engines.vllm.launch import Launcher
from node.engines.vllm.links import Listener
from node.engines.worker import Worker, end_all
from node.ipc.channel import connect

__all__ = ["main"]


def _end_with_sglang(why: str) -> NoReturn:
    """A process of SGLang's is gone: end, so that the node starts both again."""
    print(why, file=sys.stderr, flush=True)
    end_all(1)


def _launcher(given: argparse.Namespace) -> Launcher:
    if given.url:
        return RunningSglang(given.url)
    devices = share_of(given.gpus, given.cores)
    options = ServerOptions(given.port, given.tp, given.threads, devices, tuple(given.more))
    return StartedSglang(installed(given.sglang_python or Path(sys.executable)), given.log, options)


def main(arguments: list[str] | None = None) -> None:
    """The process's main function."""
    parser = argparse.ArgumentParser(prog="node.engines.sglang.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket that the node serves")
    parser.add_argument("--sglang-python", type=Path, help="Python of SGLang's environment, to start SGLang in")
    parser.add_argument("--url", help="URL of an SGLang that runs already")
    parser.add_argument("--port", type=int, default=30000, help="port of SGLang's endpoint, on loopback")
    parser.add_argument("--tp", type=int, default=1, help="number of tensor-parallel ranks")
    parser.add_argument("--gpus", default="", help="names of this engine's GPUs, as CUDA_VISIBLE_DEVICES has them")
    parser.add_argument("--cores", default="", help="numbers of this engine's cores, where several engines share")
    parser.add_argument("--threads", type=int, help="CPU threads of all ranks together")
    parser.add_argument(
        "--policy",
        choices=get_args(SglangPolicy),
        default="continue",
        help="what becomes of running requests at a commit",
    )
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for SGLang's own output")
    parser.add_argument("more", nargs="*", help="SGLang's own flags, after --")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which ends us
    try:
        launcher = _launcher(given)
        channel = connect(given.socket, FromNode)
        listener = Listener(given.socket.with_name(given.socket.name + ".sglang"), _end_with_sglang, "SGLang")
        Worker(SglangEngine(listener, given.policy, launcher), channel).serve()
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
