"""The engine's own process: `python -m node.engines.worker --socket PATH --engine transformers`.

Synchronous, and with no more dependencies than codec, numpy and the engine's own. One thread generates, commits and
proves, so a commit always falls between two batches, or between two steps of an engine that can stop there; one
receives; one stages, so that a version is made ready while the engine generates. When the node goes away, so does this
process, at once and with all its children.
"""

import argparse
import importlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from codec import Layout, Replica, read_patch, state_root
from codec.errors import PeerError, SwarmError, UsageError
from node.engines.base import Completion, Engine, EngineError, Scorer, SteppedEngine, Version
from node.engines.messages import (
    Attach,
    Cancel,
    Commit,
    Completions,
    Done,
    Failed,
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
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, close_fds, connect

__all__ = ["PROGRESS_EVERY_S", "Worker", "end_all", "main"]

WAKE_S: Final = 3600.0
"""A receive without a deadline is one with a long deadline, again and again."""
PROGRESS_EVERY_S: Final = 0.5
"""Often enough for leases of seconds to be renewed, seldom enough to cost nothing."""
ENGINES: Final = {"transformers": "node.engines.transformers:TransformersEngine"}


class Worker:
    """One engine, one node. `serve` runs until the node hangs up."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._layout: Layout | None = None
        self._replica: Replica | None = None
        self._stepped = engine if isinstance(engine, SteppedEngine) else None
        self._began: dict[int, float] = {}
        """The flights that run, and when they began."""
        self._committed: tuple[int, float] | None = None
        """A commit whose answer waits for the next step: its number and its pause."""
        self._told_at = 0.0
        self._staged: Version | None = None
        """What `engine.stage` was last given, whole; None while it is being given something."""
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue()
        self._stagings: queue.Queue[Callable[[], None]] = queue.Queue()

    def serve(self) -> None:
        """Work in this thread until the process ends; never returns."""
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        threading.Thread(target=self._work_off, args=(self._stagings,), name="stage", daemon=True).start()
        engine = self._engine
        ready = Ready(
            os.getpid(),
            self._stepped is not None,
            isinstance(engine, Scorer),
            abilities=tuple(sorted(engine.abilities)),
            kind=engine.kind,
        )
        self._channel.send(ready)
        if self._stepped is None:
            self._work_off(self._tasks)
        else:
            self._step_for_ever(self._stepped)

    def _work_off(self, tasks: "queue.Queue[Callable[[], None]]") -> None:
        while True:
            tasks.get()()

    # ------------------------------------------------------------ an engine that stops after any token

    def _step_for_ever(self, engine: SteppedEngine) -> None:
        while True:
            if not self._began:
                self._tasks.get()()
                continue
            try:
                self._tasks.get_nowait()()
            except queue.Empty:
                self._step(engine)

    def _step(self, engine: SteppedEngine) -> None:
        """One token for all that runs; then say what is done, and now and then how far the others are."""
        started = time.perf_counter()
        try:
            finished = engine.step()
        except Exception as error:  # the other place where an engine's errors end: see `_answer`
            traceback.print_exc()
            self._fail_flights(error)
            return
        now = time.perf_counter()
        self._answer_commit(now - started)
        for number, completions in finished:
            self._say(_completions(number, completions, now - self._began.pop(number)))
        if now - self._told_at >= PROGRESS_EVERY_S:
            self._told_at = now
            for number, counts in engine.counts().items():
                self._say(Progress(number, tuple(counts)))

    def _fail_flights(self, error: Exception) -> None:
        assert self._stepped is not None
        self._answer_commit(0.0)
        for number in list(self._began):
            self._stepped.cancel(number)
            del self._began[number]
            self._say(self._failure(Cancel(number), error))

    def _answer_commit(self, resume_s: float) -> None:
        """The answer to a commit says how long what ran before it had to wait for its next token."""
        if self._committed is not None:
            number, pause_s = self._committed
            self._committed = None
            self._say(Done(number, pause_s, resume_s))

    def _begin(self, message: Generate) -> None:
        assert self._stepped is not None
        self._stepped.begin(message.number, message.prompts, message.sampling)
        self._began[message.number] = time.perf_counter()

    def _cancel(self, number: int) -> None:
        if self._stepped is not None:
            self._stepped.cancel(number)
            self._began.pop(number, None)
            if not self._began:
                self._answer_commit(0.0)

    # ------------------------------------------------------------ messages

    def _receive(self) -> None:
        try:
            while True:
                try:
                    message, fds = self._channel.recv(WAKE_S)
                except ChannelTimeout:
                    continue
                line = self._stagings if isinstance(message, Stage) else self._tasks
                line.put(lambda message=message, fds=fds: self._answer(message, fds))
        except (ChannelClosed, PeerError):
            end_all()

    def _answer(self, message: Any, fds: list[int]) -> None:
        """The one place where an engine's errors end: they are told to the node, which knows what to do."""
        try:
            answer = self._do(message, fds)
        except (EngineError, UsageError, ValueError, PeerError) as error:
            answer = self._failure(message, error)
        except Exception as error:  # whatever torch or a kernel raises: the node decides, and this log tells
            traceback.print_exc()
            answer = self._failure(message, error)
        finally:
            close_fds(fds)
        if answer is not None:
            self._say(answer)

    def _say(self, answer: Any) -> None:
        try:
            self._channel.send(answer, timeout_s=60.0)
        except SwarmError:
            end_all()

    def _failure(self, message: Any, error: Exception) -> Failed:
        why = str(error) or repr(error)
        poisoned = getattr(self._engine, "poisoned", None) is not None
        return Failed(message.number, why, isinstance(error, UsageError), poisoned)

    def _do(self, message: Any, fds: list[int]) -> Any:
        """The answer, or None when it comes later, or never."""
        match message:
            case Attach():
                return self._attach(message, fds)
            case Stage(number, version):
                return Done(number, self._stage(fds[0], version))
            case Commit(number, version, root):
                pause_s = self._commit(version, root)
                if not self._began:
                    return Done(number, pause_s)
                self._committed = (number, pause_s)
                return None
            case Generate() if self._stepped is not None:
                return self._begin(message)
            case Generate(number, prompts, sampling):
                started = time.perf_counter()
                completions = self._engine.generate(prompts, sampling)
                return _completions(number, completions, time.perf_counter() - started)
            case Cancel(number):
                return self._cancel(number)
            case Score(number, prompt, token_ids, sampling):
                if not isinstance(self._engine, Scorer):
                    raise ValueError("this engine cannot score tokens")
                found = self._engine.score(prompt, token_ids, sampling)
                return Scores(number, tuple(found), self._engine.version)
            case Prove(number):
                return Proof(number, self._live_root())
            case Reload(number, version, root):
                return self._reload(number, version, root)
        raise PeerError(f"engine: {type(message).__name__}")

    def _attach(self, message: Attach, fds: list[int]) -> Proof:
        layout = Layout.from_bytes(message.layout)
        self._layout = layout
        self._replica = Replica.attach(os.dup(fds[0]), layout, np.zeros((layout.n_blocks, 32), np.uint8))
        self._staged = None
        self._engine.load(Path(message.folder), weights=False)
        self._engine.attach(layout, message.version, message.root)
        return self._reload(message.number, message.version, message.root)

    def _reload(self, number: int, version: Version, root: bytes) -> Proof:
        """The proof matters: the replica may have moved on while it was read."""
        if self._replica is None:
            raise EngineError("nothing is attached")
        self._staged = None
        if self._stepped is not None:
            self._fail_flights(EngineError("the engine was reloaded"))
        self._engine.reload(self._replica.bits, version, root)
        return Proof(number, self._live_root())

    def _stage(self, fd: int, version: Version) -> float:
        started = time.perf_counter()
        self._staged = None
        self._engine.stage(read_patch(fd))
        self._staged = version
        return time.perf_counter() - started

    def _commit(self, version: Version, root: bytes) -> float:
        if self._staged != version:
            raise EngineError(f"{version} is not what is staged ({self._staged})")
        self._staged = None
        return self._engine.commit(version, root)

    def _live_root(self) -> bytes:
        if self._layout is None:
            raise EngineError("nothing is attached")
        return state_root(self._layout.hash, self._engine.live_hashes(self._layout))


def _completions(number: int, completions: list[Completion], seconds: float) -> Completions:
    return Completions(number, tuple(completions), seconds)


def end_all(code: int = 0) -> None:
    """The node is gone: end without a word, with every process that the engine started."""
    if os.getpgrp() == os.getpid():  # as `node.engines.host` starts us
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _engine(name: str, threads: int | None, device: str | None) -> Engine:
    """`transformers`, or `module:Class` of an `Engine` that takes the same arguments."""
    module, _, kind = ENGINES.get(name, name).partition(":")
    try:
        made = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"The engine {name} cannot be loaded: {error}") from error
    return made(threads=threads, device=device)


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
        Worker(_engine(given.engine, given.threads, given.device), channel).serve()
    except SwarmError as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
