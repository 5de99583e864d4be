"""One vLLM under the driver of a node, with a replica that a test or scenario advances."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from codec import Checkpoint, Replica, write_patch
from codec.adapter import AdapterSlots
from codec.parts import extended
from codec.staging import StagedChunk
from node.coordinator.draft import load_draft
from node.engines.base import Completion, EngineError, Prompt, SamplingParams
from node.engines.interface import SharedReplica, WeightPatch
from node.engines.judgement import Claim, Judgement
from node.engines.server_process import ServerProcess
from node.engines.vllm.adapters import adapter_flags
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.installed import installed
from node.engines.vllm.links import Listener
from node.engines.vllm.plugin.swarm_vllm.messages import Policy
from node.engines.vllm.server import Server, ServerOptions, attach_to
from node.engines.vllm.speculation import DraftModel
from node.host.port import free_port
from scenarios.engines.adapter_models import MadeAdapter

__all__ = ["PROBE_ENV", "SMALL", "WITHIN_S", "Bench", "bench"]

SMALL: Final = ("--max-model-len", "512", "--max-num-seqs", "8")
"""vLLM's flags for small test models."""
_PROBE: Final = {"PYTHONPATH": str(Path(__file__).with_name("vllm_probe"))}
"""Lets vLLM's processes import the modules of `vllm_probe`, and fork (its `sitecustomize`)."""
PROBE_ENV: Final = {**_PROBE, "VLLM_SERVER_DEV_MODE": "1"}
"""Opens the development route that calls them, too."""
WITHIN_S: Final = 300.0
"""Timeout of one generation, score or judgement."""


@dataclass
class Bench:
    """A running vLLM and a replica.

    `version`: the replica's. `lost`: the driver's report of each vLLM process that disconnected. Its methods raise
    `EngineError` when the engine fails.
    """

    engine: VllmEngine
    replica: Replica
    checkpoint: Checkpoint
    url: str
    pid: int
    lost: list[str] = field(default_factory=list)
    version: int = 0
    flights: int = 0
    """Generations begun so far, which is also the number of the last flight."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, staged: Sequence[StagedChunk]) -> int:
        """Advance the replica by one version. Returns a descriptor of its weight patch, which the caller closes."""
        fd, _ = write_patch(staged, self.replica.layout)
        self.replica.scatter(staged)
        self.version += 1
        return fd

    def update(self, staged: Sequence[StagedChunk]) -> float:
        """Advance the replica and then the engine by one version. Returns the engine's pause in seconds."""
        self.stage(staged)
        return self.commit()

    def stage(self, staged: Sequence[StagedChunk]) -> None:
        """Advance the replica by one version and stage that version in the engine."""
        fd = self.advance(staged)
        try:
            self.engine.stage_patch(WeightPatch(fd, (0, self.version)))
        finally:
            os.close(fd)

    def commit(self) -> float:
        """Commit the replica's version in the engine. Returns the pause in seconds."""
        return self.engine.commit((0, self.version), self.replica.root)

    def reload(self) -> bytes:
        return self.engine.reload_replica((0, self.version), self.replica.root)

    def set_adapter(self, adapter: MadeAdapter, slot: int, version: int) -> float:
        """Give the engine a version of an adapter. Returns the engine's pause in seconds."""
        with adapter.given(slot, (0, version)) as given:
            root = self.engine.stage_adapter(given)
            assert root == given.root
        return self.engine.switch_adapter(slot)

    def begin(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = ""
    ) -> "Future[list[Completion]]":
        """Start completions and return a future of them."""
        future: Future[list[Completion]] = Future()
        with self._lock:
            self.flights += 1
            flight = self.flights
        self.engine.begin(flight, prompts, sampling, lambda _, outcome: _settle(future, outcome), adapter)
        return future

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> list[Completion]:
        return self.begin(prompts, sampling, adapter).result(WITHIN_S)

    def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[float, ...]:
        """Score a sample; see `node.engines.interface.ScoringEngine`."""
        return self.begin_score(prompt, token_ids, sampling, adapter).result(WITHIN_S)

    def begin_score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> "Future[tuple[float, ...]]":
        """Start scoring and return a future of the log-probabilities."""
        future: Future[tuple[float, ...]] = Future()
        self.engine.begin_score(prompt, token_ids, sampling, lambda outcome: _settle(future, outcome), adapter)
        return future

    def judge(self, claims: Sequence[Claim]) -> list[Judgement]:
        """Judge claims, all at once; see `node.engines.interface.JudgingEngine`."""
        return [future.result(WITHIN_S) for future in [self.begin_judge(claim) for claim in claims]]

    def begin_judge(self, claim: Claim) -> "Future[Judgement]":
        """Start a judgement and return a future of it."""
        future: Future[Judgement] = Future()
        self.engine.begin_judge(claim, lambda outcome: _settle(future, outcome))
        return future

    def greedy(
        self, prompts: Sequence[Sequence[int]], tokens: int, adapter: str = ""
    ) -> list[tuple[list[int], list[float]]]:
        """Return greedy tokens and log-probabilities. Prompts run one at a time, so that batches are equal in all
        engines that are compared."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        completions = [self.generate([Prompt(tuple(prompt))], sampling, adapter)[0] for prompt in prompts]
        return [(list(completion.token_ids), list(completion.logprobs)) for completion in completions]


def _settle(future: "Future[Any]", outcome: Any) -> None:
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


@contextlib.contextmanager
def bench(
    folder: Path,
    home: Path,
    python: Path,
    *,
    ranks: int = 1,
    more: Sequence[str] = SMALL,
    url: str = "",
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    slots: AdapterSlots | None = None,
    policy: Policy = "continue",
    draft: Path | None = None,
) -> Iterator[Bench]:
    """Start a vLLM and load the weights of `folder` as version 0. `url`: attach to that vLLM instead. `slots`: the room
    for adapters. `draft`: the folder of a draft model, which becomes a part of the replica."""
    checkpoint = Checkpoint.open(folder)
    replica = Replica.from_checkpoint(checkpoint) if draft is None else _with_draft(checkpoint, Checkpoint.open(draft))
    home.mkdir(parents=True, exist_ok=True)
    files = home / "files"
    files.mkdir(exist_ok=True)
    for name, data in checkpoint.files.items():
        (files / name).write_bytes(data)
    lost: list[str] = []
    listener = Listener(home / "vllm.sock", lost.append)
    engine = VllmEngine(listener, policy)
    fd = replica.seal_for_readers()
    server: Any = None
    try:
        if not url:
            engine.give_weights(replica.layout, fd)
            port = free_port()
            room = () if slots is None else adapter_flags(replica.layout, slots)
            options = ServerOptions(port, ranks, threads, flags=(*room, *more), env={**_PROBE, **(env or {})})
            model = None if draft is None else DraftModel.of(draft, replica.layout)
            server = Server(installed(python), files, home / "vllm.log", listener.path, options, model)
            server.wait_ready()
            url = f"http://127.0.0.1:{port}"
        attach_to(url, listener.path)
        engine.attach_replica(SharedReplica(replica, fd, files, slots, draft))
        if engine.reload_replica((0, 0), replica.root) != replica.root:
            raise EngineError("the engine was not filled")
        yield Bench(engine, replica, checkpoint, url, 0 if server is None else server.pid, lost)
    finally:
        engine.close()
        if server is not None:
            stop(server.pid, server)


def _with_draft(base: Checkpoint, draft: Checkpoint) -> Replica:
    """A replica of both, as a seed makes it."""
    replica = Replica.create(extended(base.layout, draft=draft.layout))
    replica.load(base)
    load_draft(replica, draft)
    return replica


def stop(pid: int, server: ServerProcess) -> None:
    """Stop a vLLM and kill the workers that remain."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    server.stop()
    for child in children:
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(child), 9)
