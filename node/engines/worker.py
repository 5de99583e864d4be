"""The engine's own process: `python -m node.engines.worker --socket PATH --engine transformers`.

Synchronous, and with no more dependencies than codec, numpy and the engine's own. The main thread generates, commits
and proves (`node.engines.generation`); a second thread receives requests; a third stages patches and a fourth reads
blocks back, so both happen while the engine generates. When the node goes away, this process ends at once with all its
children.
"""

import argparse
import importlib
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from codec import Layout, Replica
from codec.adapter import AdapterConfig, AdapterSlots
from codec.errors import PeerError, SwarmError, UsageError
from node.engines.adapters import GivenAdapter
from node.engines.base import IMAGES, EngineError, Version
from node.engines.generation import Tasks, failure, generation_of
from node.engines.images import digest_of
from node.engines.interface import Engine, ScoringEngine, SharedReplica, WeightPatch
from node.engines.messages import (
    AdapterProof,
    Attach,
    Cancel,
    Commit,
    Done,
    DropAdapter,
    FromEngine,
    FromNode,
    Generate,
    Judge,
    Proof,
    Prove,
    ProveAdapter,
    Read,
    Ready,
    Reload,
    Score,
    SetAdapter,
    Stage,
)
from node.engines.window import WINDOW_BYTES
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, close_fds, connect

__all__ = ["Worker", "end_all", "main"]

WAKE_S: Final = 3600.0
"""Seconds that one receive waits. `Channel.recv` needs a deadline; the receiving thread simply tries again."""
SEND_WITHIN_S: Final = 60.0
"""Seconds for the node to take a message. A node that takes none for so long is gone."""
ENGINES: Final = {"transformers": "node.engines.transformers:TransformersEngine"}


class Worker:
    """One engine, one node. `serve` runs until the node closes the connection."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._generation = generation_of(engine, self._send)
        self._staged: Version | None = None
        """The version of the last patch that was staged whole; None while a patch is being staged."""
        self._tasks: Tasks = queue.Queue()
        self._stagings: Tasks = queue.Queue()
        self._readings: Tasks = queue.Queue()
        self._lines = {Stage: self._stagings, SetAdapter: self._stagings, Read: self._readings}
        self._window: NDArray[np.uint8] | None = None
        """The memory into which blocks are read back; None: the node does not read any."""

    def serve(self) -> NoReturn:
        """Work in this thread until the process ends."""
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        for name, line in (("stage", self._stagings), ("read", self._readings)):
            threading.Thread(target=_work_off, args=(line,), name=name, daemon=True).start()
        engine, generation = self._engine, self._generation
        ready = Ready(
            os.getpid(),
            preemptible=generation.preemptible,
            scores=isinstance(engine, ScoringEngine),
            continuous_batching=generation.continuous_batching,
            abilities=self._abilities(),
            kind=engine.kind,
        )
        self._channel.send(ready)
        generation.run(self._tasks)

    def _receive(self) -> None:
        try:
            while True:
                try:
                    message, fds = self._channel.recv(WAKE_S)
                except ChannelTimeout:
                    continue
                line = self._lines.get(type(message), self._tasks)
                line.put(lambda message=message, fds=fds: self._answer(message, fds))
        except (ChannelClosed, PeerError):
            end_all()

    def _answer(self, message: FromNode, fds: list[int]) -> None:
        """Carry out one request with its descriptors."""
        self._answer_with(message, lambda: self._handle(message, fds), fds)

    def _answer_with(self, message: FromNode, handle: Callable[[], FromEngine | None], fds: list[int]) -> None:
        """Send what `handle` returns. Every error of the engine ends here, as an answer, and the node decides."""
        try:
            answer = handle()
        except (EngineError, UsageError, ValueError, PeerError) as error:
            answer = failure(self._engine, message.number, error)
        except Exception as error:  # torch or a kernel may raise anything; the traceback goes to this process's log
            traceback.print_exc()
            answer = failure(self._engine, message.number, error)
        finally:
            close_fds(fds)
        if answer is not None:
            self._send(answer)

    def _send(self, answer: FromEngine) -> None:
        try:
            self._channel.send(answer, timeout_s=SEND_WITHIN_S)
        except SwarmError:
            end_all()

    def _handle(self, message: FromNode, fds: list[int]) -> FromEngine | None:
        """The answer, or None when it comes later or never."""
        match message:
            case Attach():
                return self._attach(message, fds)
            case Stage(number, version):
                return Done(number, self._stage(WeightPatch(fds[0], version)))
            case Commit(number, version, root):
                return self._generation.answer_commit(number, self._commit(version, root))
            case Generate():
                _check_images(message, self._engine.abilities)
                return self._generation.generate(message)
            case Cancel(number):
                return self._generation.cancel(number)
            case Score():
                return self._generation.score(message)
            case Judge():
                return self._generation.judge(message)
            case Read(number, blocks):
                return Done(number, self._read(blocks))
            case Prove(number):
                return Proof(number, self._engine.live_root())
            case Reload(number, version, root):
                return self._proof(number, self._reload(version, root))
            case SetAdapter():
                return self._stage_adapter(message, fds[0])
            case DropAdapter(number, slot):
                self._engine.drop_adapter(slot)
                return Done(number, 0.0)
            case ProveAdapter(number, slot):
                return AdapterProof(number, self._engine.adapter_root(slot))

    def _attach(self, message: Attach, fds: list[int]) -> Proof:
        fd = fds[0]
        layout = Layout.from_bytes(message.layout)
        replica = Replica.attach(os.dup(fd), layout, np.zeros((layout.n_blocks, 32), np.uint8))
        slots = message.slots
        room = None if slots is None else AdapterSlots(slots.count, slots.rank, slots.elements)
        draft = Path(message.draft) if message.draft else None
        self._engine.attach_replica(SharedReplica(replica, fd, Path(message.folder), room, draft))
        held = self._reload(message.version, message.root)
        self._window = None
        if message.read_back:
            if self._engine.unreadable:
                raise UsageError(
                    f"--replica engine: {self._engine.unreadable}. Use --replica disk, or ram where there is room."
                )
            self._window = np.frombuffer(mmap.mmap(fds[1], WINDOW_BYTES), np.uint8)
        return self._proof(message.number, held)

    def _proof(self, number: int, root: bytes) -> Proof:
        return Proof(number, root, self._abilities(), self._engine.room)

    def _abilities(self) -> tuple[str, ...]:
        return tuple(sorted(self._engine.abilities))

    def _read(self, blocks: Sequence[int]) -> float:
        started = time.perf_counter()
        if self._window is None:
            raise EngineError("there is no window to read blocks into")
        self._engine.read_blocks(blocks, self._window)
        return time.perf_counter() - started

    def _reload(self, version: Version, root: bytes) -> bytes:
        """The root that the engine then holds: another one than `root` when the replica moved on while it was read."""
        self._staged = None
        self._generation.before_reload()
        return self._engine.reload_replica(version, root)

    def _stage(self, patch: WeightPatch) -> float:
        started = time.perf_counter()
        self._staged = None
        self._engine.stage_patch(patch)
        self._staged = patch.version
        return time.perf_counter() - started

    def _stage_adapter(self, message: SetAdapter, fd: int) -> None:
        """Make an adapter ready in this thread, and have the main thread switch to it between two steps."""
        config = AdapterConfig.from_bytes(message.config)
        if config is None:
            raise PeerError("adapter.config: of an empty slot")
        root = self._engine.stage_adapter(GivenAdapter(message.slot, config, fd, message.version, message.root))

        def switch() -> AdapterProof:
            return AdapterProof(message.number, root, self._engine.switch_adapter(message.slot))

        self._tasks.put(lambda: self._answer_with(message, switch, []))

    def _commit(self, version: Version, root: bytes) -> float:
        if self._staged != version:
            raise EngineError(f"{version} is not what is staged ({self._staged})")
        self._staged = None
        return self._engine.commit(version, root)


def _check_images(message: Generate, abilities: Container[str]) -> None:
    """Raises `ValueError` unless the images that the sampling names are there, and the engine reads images."""
    named = message.sampling.extra.images
    if named and IMAGES not in abilities:
        raise ValueError("this engine reads no images")
    if any(tuple(map(digest_of, prompt.images)) != named for prompt in message.prompts):
        raise ValueError("its images are not those that its sampling names")


def _work_off(line: Tasks) -> NoReturn:
    while True:
        line.get()()


def end_all(code: int = 0) -> NoReturn:
    """End this process and every process that the engine started. Called when the node is gone, so nothing is sent."""
    if os.getpgrp() == os.getpid():  # as `node.engines.process` starts us
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _make_engine(name: str, threads: int | None, device: str | None) -> Engine:
    """`transformers`, or `module:Class` of an `Engine` that takes the same arguments. Raises `UsageError`."""
    module, _, class_name = ENGINES.get(name, name).partition(":")
    try:
        engine_class = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"The engine {name} cannot be loaded: {error}") from error
    return engine_class(threads=threads, device=device)


def main(arguments: list[str] | None = None) -> None:
    """The process's main function."""
    parser = argparse.ArgumentParser(prog="node.engines.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket that the node serves")
    parser.add_argument("--engine", default="transformers", help="transformers, or module:Class")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--device", help="cpu, cuda, cuda:1")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which ends us
    try:
        channel = connect(given.socket, FromNode)
        Worker(_make_engine(given.engine, given.threads, given.device), channel).serve()
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
