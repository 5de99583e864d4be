"""vLLM's driver as an engine process: `python -m node.engines.vllm.worker --socket PATH --vllm-python PYTHON`.

It speaks the messages of `node.engines.messages` with the node, like any engine process, and the plugin's messages with
a vLLM, which it starts or attaches to (`--url`). When the node or the vLLM goes away, this process ends with everything
that it started, and the node starts it again.
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
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.installed import installed
from node.engines.vllm.launch import Launcher, RunningVllm, StartedVllm
from node.engines.vllm.links import Listener
from node.engines.vllm.plugin.swarm_vllm.messages import Policy
from node.engines.vllm.server import ServerOptions
from node.engines.worker import Worker, end_all
from node.ipc.channel import connect

__all__ = ["main"]


def _end_with_vllm(why: str) -> NoReturn:
    """A process of vLLM's is gone: end, so that the node starts both again."""
    print(why, file=sys.stderr, flush=True)
    end_all(1)


def _launcher(given: argparse.Namespace) -> Launcher:
    if given.url:
        return RunningVllm(given.url)
    options = ServerOptions(
        port=given.port,
        ranks=given.tp,
        threads=given.threads,
        devices=share_of(given.gpus, given.cores),
        flags=tuple(given.more),
        draft_tokens=given.draft_tokens,
    )
    return StartedVllm(installed(given.vllm_python or Path(sys.executable)), given.log, options)


def main(arguments: list[str] | None = None) -> None:
    """The process's main function."""
    parser = argparse.ArgumentParser(prog="node.engines.vllm.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket that the node serves")
    parser.add_argument("--vllm-python", type=Path, help="Python of vLLM's environment, to start vLLM in")
    parser.add_argument("--url", help="URL of a vLLM that runs already")
    parser.add_argument("--port", type=int, default=8000, help="port of vLLM's OpenAI endpoint, on loopback")
    parser.add_argument("--tp", type=int, default=1, help="number of tensor-parallel ranks")
    parser.add_argument("--gpus", default="", help="names of this engine's GPUs, as CUDA_VISIBLE_DEVICES has them")
    parser.add_argument("--cores", default="", help="numbers of this engine's cores, where several engines share")
    parser.add_argument("--threads", type=int, help="CPU threads of all ranks together")
    parser.add_argument("--draft-tokens", type=int, default=3, help="tokens that a draft model proposes at a time")
    parser.add_argument(
        "--policy", choices=get_args(Policy), default="continue", help="what becomes of running requests at a commit"
    )
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for vLLM's own output")
    parser.add_argument("more", nargs="*", help="vLLM's own flags, after --")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which ends us
    try:
        launcher = _launcher(given)
        channel = connect(given.socket, FromNode)
        listener = Listener(given.socket.with_name(given.socket.name + ".vllm"), _end_with_vllm)
        Worker(VllmEngine(listener, given.policy, launcher), channel).serve()
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
