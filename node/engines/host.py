"""The node's side of its engine: starts the process, keeps it running, and speaks to it.

Every failure ends the same way: the engine reloads all bits from the replica, in the same process after a poisoned
commit, in a new one after a crash or a timeout. It serves nothing until its live parameters hash to its version.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import trio

from codec import Layout
from codec.errors import PeerError, SwarmError, UsageError
from node.engines.base import MAX_TOKEN, Completion, Prompt, SamplingParams, Version
from node.engines.messages import (
    Attach,
    Cancel,
    Commit,
    Completions,
    Done,
    Failed,
    FromEngine,
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
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.ipc.channel import ChannelClosed, close_fds
from swarm.guard import Source

__all__ = [
    "Commitment",
    "Counts",
    "EngineDeadlines",
    "EngineFailed",
    "EngineHost",
    "EngineLost",
    "ReplicaRef",
    "worker_command",
]

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
TRIES_BEFORE_FIRST: Final = 4
"""Starts that may fail before the engine ever served: after these it is the user's to look at."""
CONNECTIONS: Final = 4
"""One engine; and one that is dying, or does not belong here."""
HELLO_WITHIN_S: Final = 60.0
"""An engine's process says `Ready` as soon as it has connected."""
VERSIONS: Final = 64
"""That the engine held lately: a sequence may have begun at any of them."""
USAGE: Final = 2
"""Exit code of an engine process that ended with a sentence for the user."""
RELOADS: Final = 5
"""Times that a reload is tried while the replica moves on under it."""

_log = logging.getLogger(__name__)


class EngineLost(SwarmError):
    """The engine's process ended, or did not answer in time; it is being started anew."""


class EngineFailed(SwarmError):
    """The engine refused, and says why. `poisoned`: it serves nothing until it was reloaded."""

    def __init__(self, why: str, poisoned: bool) -> None:
        super().__init__(why)
        self.poisoned = poisoned


@dataclass(frozen=True, slots=True)
class ReplicaRef:
    """The node's replica, from which an engine is filled. `fd` stays the replica's; `folder` has config and tokenizer.

    The replica may move on at any time; then what is read from it does not match `root`, and the reader finds out."""

    layout: Layout
    fd: int
    folder: Path
    version: Version
    root: bytes


@dataclass(frozen=True, slots=True)
class EngineDeadlines:
    """Seconds after which an engine that does not answer is killed."""

    attach_s: float = 1800.0
    """Loading and hashing the largest models from memory, on the slowest boxes."""
    stage_s: float = 300.0
    commit_s: float = 60.0
    generate_s: float = 1800.0
    """Of one batch; the work leases' own deadlines are usually far shorter."""
    prove_s: float = 600.0
    stop_s: float = 5.0


class Commitment(NamedTuple):
    """What a commit took: `pause_s` while nothing was generated, `resume_s` until what ran had its next token."""

    pause_s: float
    resume_s: float = 0.0


Counts = Callable[[tuple[int, ...]], None]
"""Hears how many tokens each prompt has by now."""


class _Asked(NamedTuple):
    """A `Generate` that runs, and who hears how far it is."""

    counts: Counts
    prompts: int
    max_tokens: int


@dataclass(eq=False)
class _Link:
    """One connected process. `answers`: by number, those asked for and, once there, given."""

    channel: AsyncChannel
    asked: dict[int, trio.Event] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    progress: dict[int, "_Asked"] = field(default_factory=dict)


def worker_command(
    socket: Path, engine: str = "transformers", threads: int | None = None, device: str | None = None
) -> list[str]:
    """The command that starts an engine process in this very Python environment."""
    command = [sys.executable, "-m", "node.engines.worker", "--socket", str(socket), "--engine", engine]
    command += ["--threads", str(threads)] if threads is not None else []
    return command + (["--device", device] if device is not None else [])


class EngineHost:
    """One engine. `run` supervises it; the other methods may be called from any task, and one at a time of each kind
    (several times `generate` where the engine `preemptible`).

    They raise `EngineLost` when there is no engine (any more), `EngineFailed` when it refuses.
    """

    def __init__(
        self,
        socket: Path,
        command: Sequence[str],
        log: Path,
        source: Callable[[], Awaitable[ReplicaRef]],
        deadlines: EngineDeadlines = EngineDeadlines(),
    ) -> None:
        """`command`: see `worker_command`. `log`: where its output goes. `source()`: the replica, when it is wanted."""
        self._socket = socket
        self._command = list(command)
        self._log = log
        self._source = source
        self._deadlines = deadlines
        self._link: _Link | None = None
        self._process: trio.Process | None = None
        self._ready = trio.Event()
        self._number = 0
        self._refusal: UsageError | None = None
        self._served = False
        self.version: Version = (0, 0)
        """What the engine holds, while it is ready."""
        self.root: bytes = b""
        self._held: deque[Version] = deque(maxlen=VERSIONS)
        self.preemptible = False
        """It can stop after any token: a commit may fall into a sequence, and calls of `generate` may overlap."""
        self.continuous_batching = False
        """Sequences begun at different times share its steps, so each may be a call of `generate` by itself."""
        self.scores = False
        """It can say how likely given tokens are."""
        self.abilities: frozenset[str] = frozenset()
        """What else it can do: of `node.engines.base.ABILITIES`."""
        self.kind = ""
        """Engines of one kind draw the same tokens for the same seed."""
        self.restarts = 0
        self.reloads = 0
        self._reloading = trio.Lock()

    @property
    def ready(self) -> bool:
        """The engine is attached and proven."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        """Wait until it is; a restart may take minutes."""
        await self._ready.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep an engine running until cancelled; then nothing of it is left. `started()` once it may connect.

        Raises `UsageError`, with the engine's own words, when it cannot be started or refuses the model.
        """
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    lambda task_status: serve_socket(
                        self._socket,
                        self._converse,
                        receives=FromEngine,
                        source=Source.ENGINE,
                        max_connections=CONNECTIONS,
                        task_status=task_status,
                    )
                )
                task_status.started()
                await self._supervise()
                nursery.cancel_scope.cancel()
        except* UsageError as errors:
            raise errors.exceptions[0] from None

    async def _supervise(self) -> None:
        pause_s, failures = FIRST_PAUSE_S, 0
        while True:
            self._served = False
            code = await self._one_life()
            if self._refusal is not None:
                raise self._refusal
            if code == USAGE:
                raise UsageError(_last_line(self._log))
            pause_s, failures = (
                (FIRST_PAUSE_S, 0) if self._served else (min(2 * pause_s, LONGEST_PAUSE_S), failures + 1)
            )
            if failures >= TRIES_BEFORE_FIRST and not self.restarts:
                raise UsageError(f"The engine ends before it serves (code {code}): {_last_line(self._log)}")
            if self._served:
                self.restarts += 1
            _log.warning("engine ended with code %s; starting it again in %.1f s", code, pause_s)
            await trio.sleep(pause_s)

    async def _one_life(self) -> int:
        """Start the process, wait for its end, and leave none of its children."""
        with _appending(self._log) as log:
            self._process = process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            return await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True), trio.move_on_after(self._deadlines.stop_s):
                await process.wait()

    def _kill(self, why: str) -> None:
        _log.warning("engine killed: %s", why)
        self._not_ready()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # ------------------------------------------------------------ one connection

    async def _converse(self, channel: AsyncChannel) -> None:
        with trio.fail_after(HELLO_WITHIN_S):
            hello, fds = await channel.recv()
        close_fds(fds)
        if not isinstance(hello, Ready) or self._link is not None:
            raise ChannelClosed("not an engine, or one too many")
        self._link = link = _Link(channel)
        self.preemptible, self.continuous_batching, self.scores = (
            hello.preemptible,
            hello.continuous_batching,
            hello.scores,
        )
        self.abilities, self.kind = frozenset(hello.abilities), hello.kind
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._attach, link)
                while True:
                    answer, fds = await channel.recv()
                    close_fds(fds)
                    if isinstance(answer, Ready):
                        raise PeerError("it said Ready twice")
                    if isinstance(answer, Progress):
                        self._hear(link, answer)
                    elif (event := link.asked.pop(answer.number, None)) is not None:
                        link.answers[answer.number] = answer
                        event.set()
        except* ChannelClosed:
            pass
        except* PeerError as errors:
            self._kill(f"what it says makes no sense: {errors.exceptions[0]}")
        finally:
            self._link = None
            self._not_ready()
            channel.close()
            for event in link.asked.values():  # no answer: `_ask` raises
                event.set()

    def _hear(self, link: _Link, progress: Progress) -> None:
        """Raises `PeerError` for counts of other sequences than were asked for, or of more tokens."""
        if (asked := link.progress.get(progress.number)) is None:
            return
        if len(progress.counts) != asked.prompts or max(progress.counts, default=0) > asked.max_tokens:
            raise PeerError("its counts are not those of the sequences it draws")
        asked.counts(progress.counts)

    async def _attach(self, link: _Link) -> None:
        try:
            for _ in range(RELOADS):
                ref = await self._source()
                message = Attach(self._next(), ref.layout.to_bytes(), str(ref.folder), ref.version, ref.root)
                proof = await self._ask(link, message, Proof, self._deadlines.attach_s, [ref.fd])
                if proof.root == ref.root:
                    self._serve_as(ref)
                    return
            self._kill("its live parameters are not the replica's bits")
        except EngineLost:
            pass  # the process is gone; `_supervise` starts the next
        except EngineFailed as error:
            self._kill(str(error))
        except UsageError as error:
            self._refusal = error
            self._kill(str(error))

    def _serve_as(self, ref: ReplicaRef) -> None:
        self._hold(ref.version, ref.root)
        self._served = True
        self._ready.set()

    def _hold(self, version: Version, root: bytes) -> None:
        self.version, self.root = version, root
        self._held.append(version)

    def _not_ready(self) -> None:
        if self._ready.is_set():  # else somebody may be waiting for this very event
            self._ready = trio.Event()

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(
        self, link: _Link | None, message: Any, kind: type, deadline_s: float, fds: Sequence[int] = ()
    ) -> Any:
        if link is None:
            raise EngineLost("no engine is running at the moment")
        event = link.asked[message.number] = trio.Event()
        try:
            with trio.move_on_after(deadline_s) as scope:
                await link.channel.send(message, fds)
                await event.wait()
            if scope.cancelled_caught:
                self._kill(f"{kind.__name__} took longer than {deadline_s:g} s")
                raise EngineLost(f"the engine did not answer within {deadline_s:g} s")
        except ChannelClosed as error:
            raise EngineLost("the engine's process ended") from error
        except ValueError as error:  # larger than a frame may be
            raise EngineFailed(str(error), poisoned=False) from error
        finally:
            link.asked.pop(message.number, None)
        answer = link.answers.pop(message.number, None)
        if answer is None:
            raise EngineLost("the engine's process ended")
        if isinstance(answer, Failed):
            if answer.usage:
                raise UsageError(answer.why)
            raise EngineFailed(answer.why, answer.poisoned)
        if not isinstance(answer, kind):
            self._kill(f"it answered {type(answer).__name__}")
            raise EngineLost("the engine answered out of turn")
        return answer

    def _attached(self) -> _Link:
        if self._link is None or not self.ready:
            raise EngineLost("the engine is not ready")
        return self._link

    # ------------------------------------------------------------ what a node asks of it

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, counts: Counts | None = None
    ) -> tuple[Sequence[Completion], float]:
        """(a completion for each prompt, seconds that it took). `counts` hears how far they are, if the engine tells.

        Whoever is cancelled in it tells the engine that nobody wants them any more.
        """
        link, number = self._attached(), self._next()
        if counts is not None:
            link.progress[number] = _Asked(counts, len(prompts), sampling.max_tokens)
        try:
            message = Generate(number, tuple(prompts), sampling)
            answer = await self._ask(link, message, Completions, self._deadlines.generate_s)
        except EngineFailed as error:
            if not error.poisoned:
                raise
            await self.reload()
            raise EngineLost(f"the engine was reloaded: {error}") from error
        except trio.Cancelled:
            with trio.CancelScope(shield=True), trio.move_on_after(1.0), contextlib.suppress(ChannelClosed):
                await link.channel.send(Cancel(number))
            raise
        finally:
            link.progress.pop(number, None)
        if why := self._wrong(answer.completions, len(prompts), sampling):
            self._kill(why)
            raise EngineLost(f"the engine's answer makes no sense: {why}")
        return answer.completions, answer.seconds

    def _wrong(self, completions: Sequence[Completion], prompts: int, sampling: SamplingParams) -> str:
        """Why these cannot be what was asked for; empty if they can."""
        if len(completions) != prompts:
            return f"{len(completions)} completions for {prompts} prompts"
        for completion in completions:
            if len(completion.token_ids) > sampling.max_tokens:
                return f"{len(completion.token_ids)} tokens where {sampling.max_tokens} were asked for"
            if not all(0 <= token <= MAX_TOKEN for token in completion.token_ids):
                return "token ids out of range"
            if any(span.version not in self._held for span in completion.spans):
                return "tokens of a version that it never held"
        return ""

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
    ) -> tuple[tuple[float, ...], Version]:
        """(the log-probability of each of `token_ids` after `prompt`, the version that says so)."""
        message = Score(self._next(), tuple(prompt), tuple(token_ids), sampling)
        answer = await self._ask(self._attached(), message, Scores, self._deadlines.prove_s)
        if len(answer.logprobs) != len(token_ids):
            self._kill(f"{len(answer.logprobs)} scores for {len(token_ids)} tokens")
            raise EngineLost("the engine's answer makes no sense")
        return answer.logprobs, answer.version

    async def stage(self, patch_fd: int, version: Version) -> float:
        """Make `version` ready while the engine generates; seconds. `patch_fd` stays the caller's."""
        message = Stage(self._next(), version)
        return (await self._ask(self._attached(), message, Done, self._deadlines.stage_s, [patch_fd])).seconds

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        """Become `version`, which was staged; what that took. None: it failed, and the engine was reloaded."""
        link = self._attached()
        try:
            message = Commit(self._next(), version, root)
            done = await self._ask(link, message, Done, self._deadlines.commit_s)
        except EngineFailed as error:
            _log.warning("commit of %s failed (%s); reloading the engine from the replica", version, error)
            await self.reload()
            return None
        self._hold(version, root)
        return Commitment(done.seconds, done.resume_s)

    async def reload(self) -> None:
        """Take every bit anew from the replica, at whatever version it holds now, and prove it. Whoever asks while it
        is being done waits for that."""
        if self._reloading.locked():
            async with self._reloading:
                self._attached()
                return
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        link = self._attached()
        self._not_ready()
        self.reloads += 1
        for _ in range(RELOADS):
            ref = await self._source()
            try:
                message = Reload(self._next(), ref.version, ref.root)
                proof = await self._ask(link, message, Proof, self._deadlines.attach_s)
            except EngineFailed as error:
                self._kill(str(error))
                raise EngineLost("the engine cannot be reloaded; it is being started anew") from error
            if proof.root == ref.root:
                self._serve_as(ref)
                return
        self._kill("its live parameters are not the replica's bits")
        raise EngineLost("the engine cannot be reloaded; it is being started anew")

    async def prove(self) -> bytes:
        """The root that the live parameters add up to, read back out of the engine."""
        return (await self._ask(self._attached(), Prove(self._next()), Proof, self._deadlines.prove_s)).root


def _appending(path: Path) -> BinaryIO:
    return open(path, "ab")


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4096:].decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else f"it said nothing; see {log}"
