"""vLLM's driver as an engine process: `python -m node.engines.vllm.worker --socket PATH --vllm-python PYTHON`.

It speaks the messages of `node.engines.messages` with the node, like any engine process, and `plugin`'s with vLLM,
which it starts, or attaches to (`--url`). When the node goes away, or vLLM does, so does this process, with all that it
started; the node begins anew.
"""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from codec import Layout, Replica, state_root
from codec.errors import PeerError, SwarmError, UsageError
from node.engines.base import EXACT_SEED, OPTIONS, SCORE_OPTIONS, Completion, EngineError, Version
from node.engines.messages import (
    Attach,
    Cancel,
    Commit,
    Completions,
    Done,
    FromNode,
    Generate,
    Progress,
    Proof,
    Prove,
    Ready,
    Reload,
    Score,
    Scores,
    Stage,
)
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.flights import ScoresFound
from node.engines.vllm.links import Listener
from node.engines.vllm.plugin.swarm_vllm.messages import Policy
from node.engines.vllm.server import Installed, Server, attach_to, installed
from node.engines.worker import PROGRESS_EVERY_S, Worker, end_all
from node.ipc.channel import Channel, connect

__all__ = ["VllmWorker", "main"]


class VllmWorker(Worker):
    """One vLLM, one node."""

    def __init__(
        self, channel: Channel, listener: Listener, given: argparse.Namespace, where: Installed | None
    ) -> None:
        """`where`: the environment to start vLLM in; None: attach to `given.url`."""
        self._vllm = VllmEngine(listener, cast(Policy, given.policy))
        super().__init__(cast(Any, self._vllm), channel)
        self._listener, self._given, self._where = listener, given, where
        self._began_at: dict[int, float] = {}

    def serve(self) -> None:
        for run, name in ((self._receive, "receive"), (self._stage_for_ever, "stage"), (self._tell_for_ever, "tell")):
            threading.Thread(target=run, name=name, daemon=True).start()
        abilities, kind = _abilities(self._where)
        self._channel.send(
            Ready(
                os.getpid(),
                preemptible=True,
                scores=True,
                continuous_batching=True,
                abilities=tuple(sorted(abilities)),
                kind=kind,
            )
        )
        self._work_off(self._tasks)

    def _stage_for_ever(self) -> None:
        self._work_off(self._stagings)

    def _tell_for_ever(self) -> None:
        """Say now and then how far what runs is."""
        while True:
            time.sleep(PROGRESS_EVERY_S)
            for number, counts in self._vllm.counts().items():
                self._say(Progress(number, tuple(counts)))

    def _do(self, message: Any, fds: list[int]) -> Any:
        vllm = self._vllm
        match message:
            case Attach():
                return self._attach(message, fds)
            case Stage(number, version):
                started = time.perf_counter()
                vllm.stage(fds[0], version)
                return Done(number, time.perf_counter() - started)
            case Commit(number, version, root):
                return Done(number, vllm.commit(version, root))
            case Generate(number, prompts, sampling):
                self._began_at[number] = time.perf_counter()
                vllm.begin(number, prompts, sampling, self._ended)
                return None
            case Cancel(number):
                self._began_at.pop(number, None)
                return vllm.cancel(number)
            case Score(_, prompt, token_ids, sampling):
                return vllm.score(prompt, token_ids, sampling, self._scored(message))
            case Prove(number):
                assert self._layout is not None
                return Proof(number, state_root(self._layout.hash, vllm.live_hashes()))
            case Reload(number, version, root):
                return self._reload(number, version, root)
        raise PeerError(f"engine: {type(message).__name__}")

    def _scored(self, message: Score) -> ScoresFound:
        version = self._vllm.version

        def found(outcome: "tuple[float, ...] | EngineError") -> None:
            failed = isinstance(outcome, EngineError)
            self._say(self._failure(message, outcome) if failed else Scores(message.number, outcome, version))

        return found

    def _ended(self, number: int, outcome: "list[Completion] | EngineError") -> None:
        began = self._began_at.pop(number, None)
        if isinstance(outcome, EngineError):
            self._say(self._failure(Cancel(number), outcome))
        elif began is not None:
            self._say(Completions(number, tuple(outcome), time.perf_counter() - began))

    def _attach(self, message: Attach, fds: list[int]) -> Proof:
        self._layout = layout = Layout.from_bytes(message.layout)
        replica = Replica.attach(os.dup(fds[0]), layout, np.zeros((layout.n_blocks, 32), np.uint8))
        given = self._given
        if self._vllm.attached:
            pass
        elif self._where is None:
            attach_to(given.url, self._listener.path)
        else:
            self._vllm.give_weights(layout, fds[0])
            server = Server(
                self._where, Path(message.folder), given.log, port=given.port, socket=self._listener.path,
                ranks=given.tp, threads=given.threads, first_gpu=given.first_gpu, more=given.more,
            )  # fmt: skip
            server.wait_ready()
            attach_to(f"http://127.0.0.1:{given.port}", self._listener.path)
        self._vllm.attach(layout, replica, fds[0])
        return self._reload(message.number, message.version, message.root)

    def _reload(self, number: int, version: Version, root: bytes) -> Proof:
        return Proof(number, self._vllm.reload(version, root))


def _lost(why: str) -> None:
    """vLLM is gone: the node starts us anew."""
    print(why, file=sys.stderr, flush=True)
    end_all(1)


def _abilities(where: Installed | None) -> tuple[set[str], str]:
    """Of the vLLM in `where`, or of one that somebody else runs; and its kind. By itself vLLM rounds a token's logits
    by what else is in its batch; on a GPU it can be told not to, before it starts."""
    found = {OPTIONS, SCORE_OPTIONS}
    if where is None:
        return found, "vllm"
    if not where.cpu and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        found.add(EXACT_SEED)
    return found, f"vllm/{where.version}/{'cpu' if where.cpu else 'gpu'}"


def main(arguments: list[str] | None = None) -> None:
    """The process's main function."""
    parser = argparse.ArgumentParser(prog="node.engines.vllm.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket that the node serves")
    parser.add_argument("--vllm-python", type=Path, help="Python of vLLM's environment, to start it in")
    parser.add_argument("--url", help="a vLLM that runs already")
    parser.add_argument("--port", type=int, default=8000, help="of the OpenAI endpoint, on loopback")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--first-gpu", type=int, help="the first of its GPUs, where other engines have others")
    parser.add_argument("--threads", type=int, help="CPU threads of all ranks together")
    parser.add_argument("--policy", choices=get_args(Policy), default="continue", help="running requests at a commit")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="where vLLM's own output goes")
    parser.add_argument("more", nargs="*", help="vLLM's own flags, after --")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which ends us
    try:
        where = None if given.url else installed(given.vllm_python or Path(sys.executable))
        channel = connect(given.socket, FromNode)
        listener = Listener(given.socket.with_name(given.socket.name + ".vllm"), _lost)
        VllmWorker(channel, listener, given, where).serve()
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
