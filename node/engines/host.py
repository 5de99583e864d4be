"""The node's side of its engine: it keeps the process running, fills it from the replica, and asks it for work.

Every failure ends the same way: the engine reloads all bits from the replica, in the same process after a poisoned
commit, in a new process after a crash or a timeout. It serves nothing until its live parameters hash to its version.
"""

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import trio

from codec.adapter import AdapterConfig
from codec.errors import PeerError, UsageError
from node.engines.answer_checks import wrong_completions, wrong_judgement
from node.engines.base import BASE_VERSION, Completion, Prompt, SamplingParams, Version
from node.engines.held_adapters import HeldAdapters
from node.engines.judgement import Claim, Judgement
from node.engines.link import Counts, Draws, EngineFailed, EngineLink, EngineLost
from node.engines.messages import (
    Attach,
    Cancel,
    Commit,
    Completions,
    Done,
    FromEngine,
    Generate,
    Judge,
    Judged,
    Proof,
    Prove,
    Read,
    Ready,
    Reload,
    Score,
    Scores,
    Slots,
    Stage,
)
from node.engines.process import EngineProcess, EngineSpec, worker_command
from node.engines.replica_ref import ReplicaRef
from node.engines.room import NO_ROOM_TOLD, Room
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.ipc.channel import ChannelClosed, close_fds
from node.settings.event_log import EventLog
from swarm.guard import Source

__all__ = [
    "Commitment",
    "Counts",
    "EngineDeadlines",
    "EngineFailed",
    "EngineHost",
    "EngineLost",
    "EngineSpec",
    "worker_command",
]

CONNECTIONS: Final = 4
"""Connections at a time: one engine, one that is dying, and processes that do not belong here."""
HELLO_WITHIN_S: Final = 60.0
"""Seconds until `Ready`. An engine's process sends it as soon as it has connected."""
CANCEL_WITHIN_S: Final = 1.0
"""Seconds that a cancelled `generate` may take to tell the engine."""
VERSIONS: Final = 64
"""Versions that the engine held lately and that are remembered: a running sequence may have begun at any of them."""
RELOADS: Final = 5
"""How often a reload is tried while the replica moves on."""

_log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class EngineDeadlines:
    """Seconds after which an engine that does not answer is killed."""

    attach_s: float = 1800.0
    """Loading and hashing the largest models from memory, on the slowest machines."""
    stage_s: float = 300.0
    commit_s: float = 60.0
    generate_s: float = 1800.0
    """One batch. The deadlines of work leases are usually far shorter."""
    prove_s: float = 600.0
    stop_s: float = 5.0
    """Waiting for a killed process to end."""


class Commitment(NamedTuple):
    """The cost of a commit: `pause_s` without generation, `resume_s` until the running flights had their next token."""

    pause_s: float
    resume_s: float = 0.0


class EngineHost:
    """One engine. `run` supervises it; the other methods may be called from any task, and one at a time of each kind
    (several times `generate` where the engine is `preemptible`).

    They raise `EngineLost` when no engine is ready, and `EngineFailed` when the engine refuses.
    """

    def __init__(
        self,
        spec: EngineSpec,
        source: Callable[[], Awaitable[ReplicaRef]],
        deadlines: EngineDeadlines = EngineDeadlines(),
    ) -> None:
        """`source()`: the replica as it is now; called for each attachment and reload."""
        self._socket = spec.socket
        self._process = EngineProcess(spec.command, spec.log, deadlines.stop_s)
        self._source = source
        self._deadlines = deadlines
        self._link: EngineLink | None = None
        self._facts = Ready(0)
        """What the last engine that connected can do."""
        self.room: Room = NO_ROOM_TOLD
        """How much the engine generates at a time, as it said when it was filled."""
        self._ready = trio.Event()
        self._reloading = trio.Lock()
        self._held: deque[Version] = deque(maxlen=VERSIONS)
        self._coming: tuple[Version, trio.Event] | None = None
        """The version of a commit that has not been answered, and the end of that commit."""
        self._adapters = HeldAdapters(deadlines.stage_s, deadlines.prove_s)
        self.version: Version = BASE_VERSION
        """The version that the engine holds, while it is ready: of the base, if there are adapters."""
        self.root: bytes = b""
        self.reloads = 0
        """How often the engine was reloaded from the replica after it had served."""

    @property
    def ready(self) -> bool:
        """The engine is attached and proven."""
        return self._ready.is_set()

    @property
    def preemptible(self) -> bool:
        """The engine can stop after any token: a commit may fall into a sequence, and calls of `generate` overlap."""
        return self._facts.preemptible

    @property
    def continuous_batching(self) -> bool:
        """Sequences begun at different times share the engine's steps, so each may be a `generate` of its own."""
        return self._facts.continuous_batching

    @property
    def scores(self) -> bool:
        """The engine can tell the log-probabilities of given tokens."""
        return self._facts.scores

    @property
    def abilities(self) -> frozenset[str]:
        """See `node.engines.interface.Engine.abilities`. What is measured is there once the engine is ready."""
        return frozenset(self._facts.abilities)

    @property
    def kind(self) -> str:
        """Engines of one kind draw the same tokens for the same seed."""
        return self._facts.kind

    @property
    def restarts(self) -> int:
        """How often a process that had served ended and was started again."""
        return self._process.restarts

    @property
    def waits_for(self) -> str:
        """What has to happen until the engine is ready, for people; empty: it is ready."""
        if self.ready:
            return ""
        if self.asleep:
            return "swarm-node wake: it sleeps"
        if self._link is None:
            return "its process to start and import its libraries"
        return "its weights to be loaded and proven"

    async def wait_ready(self) -> None:
        """Wait until the engine is ready. A restart may take minutes."""
        await self._ready.wait()

    wait_up = wait_ready
    """Wait until a version can be given to the engine."""

    def lacks(self, version: Version) -> bool:
        """The engine is ready and older than `version`."""
        return self.ready and self.version < version

    @property
    def asleep(self) -> bool:
        """`sleep` ended the engine's process, and `wake` has not been called since."""
        return self._process.held

    async def sleep(self) -> None:
        """End the engine's process, so that its memory is free on return, and start none until `wake`."""
        self._mark_not_ready()
        await self._process.hold()

    def wake(self) -> None:
        """Start the engine again. It is filled from the replica as it is then, and ready once it has proven that."""
        self._process.release()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep an engine running until cancelled; then nothing of it is left. `started()` once it may connect.

        Raises `UsageError`, with the engine's own words, when it cannot be started or refuses the model.
        """
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    lambda task_status: serve_socket(
                        self._socket,
                        self._serve_engine,
                        receives=FromEngine,
                        source=Source.ENGINE,
                        max_connections=CONNECTIONS,
                        task_status=task_status,
                    )
                )
                task_status.started()
                await self._process.keep_running()
        except* UsageError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._adapters.close()

    def _kill(self, why: str) -> None:
        self._mark_not_ready()
        self._process.kill(why)

    # ------------------------------------------------------------ one connection

    async def _serve_engine(self, channel: AsyncChannel) -> None:
        """Attach the engine that connected, and receive its answers until it is gone."""
        with trio.fail_after(HELLO_WITHIN_S):
            hello, fds = await channel.recv()
        close_fds(fds)
        if not isinstance(hello, Ready) or self._link is not None:
            raise ChannelClosed("not an engine, or one too many")
        self._link = link = EngineLink(channel, self._kill)
        self._facts = hello
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._attach, link)
                await link.receive_answers()
        except* ChannelClosed:
            pass
        except* PeerError as errors:
            self._kill(f"it sent an invalid message: {errors.exceptions[0]}")
        finally:
            self._link = None
            self._mark_not_ready()
            link.close()

    async def _attach(self, link: EngineLink) -> None:
        try:
            for _ in range(RELOADS):
                ref = await self._source()
                fds = [ref.fd] if ref.window_fd is None else [ref.fd, ref.window_fd]
                message = Attach(
                    link.next_number(), ref.layout.to_bytes(), str(ref.folder), ref.version, ref.root,
                    read_back=ref.window_fd is not None, slots=Slots.of(ref.slots), draft=str(ref.draft or ""),
                )  # fmt: skip
                proof = await link.ask(message, Proof, self._deadlines.attach_s, fds)
                if proof.root == ref.root:
                    await self._adapters.give_all(link)
                    self._mark_ready(ref, proof)
                    return
            self._kill("its live parameters are not the replica's bits")
        except EngineLost:
            pass  # the process is gone; the supervision starts the next
        except EngineFailed as error:
            self._kill(str(error))
        except UsageError as error:
            self._mark_not_ready()
            self._process.refuse(error)

    def _mark_ready(self, ref: ReplicaRef, proof: Proof) -> None:
        if proof.abilities is not None:
            self._facts = msgspec.structs.replace(self._facts, abilities=proof.abilities)
        self.room = proof.room
        self._become(ref.version, ref.root)
        self._process.mark_served()
        self._ready.set()

    def _mark_not_ready(self) -> None:
        self._adapters.lose()
        if self._ready.is_set():  # otherwise tasks may be waiting for this very event
            self._ready = trio.Event()

    def _become(self, version: Version, root: bytes) -> None:
        self.version, self.root = version, root
        self._held.append(version)

    def _ready_link(self) -> EngineLink:
        if self._link is None or not self.ready:
            raise EngineLost("the engine is not ready")
        return self._link

    # ------------------------------------------------------------ generating

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, counts: Counts | None = None, adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[Sequence[Completion], float]:  # fmt: skip
        """(a completion for each prompt, seconds that it took). `counts` gets the progress, and `draws` the tokens as
        they are drawn, if the engine tells them; the last tokens may come with the completions only.

        `adapter`: the name of the one to draw by; a span's version is then the newer one of the base's and the
        adapter's. When the caller is cancelled, the engine is told to drop the flight.
        """
        link = self._ready_link()
        self._adapters.check_served(adapter)
        message = Generate(link.next_number(), tuple(prompts), sampling, adapter, draws is not None)
        link.watch_progress(message, counts, draws)
        try:
            answer = await link.ask(message, Completions, self._deadlines.generate_s)
        except EngineFailed as error:
            if not error.poisoned:
                raise
            await self.reload()
            raise EngineLost(f"the engine was reloaded: {error}") from error
        except trio.Cancelled:
            with trio.CancelScope(shield=True), trio.move_on_after(CANCEL_WITHIN_S), contextlib.suppress(ChannelClosed):
                await link.send(Cancel(message.number))
            raise
        finally:
            link.forget_progress(message.number)
        await self._wait_committed(answer.completions)
        await self._adapters.wait_proven(adapter, answer.completions)
        held = lambda version: version in self._held or self._adapters.held(adapter, version)  # noqa: E731
        if why := wrong_completions(answer.completions, message, held):
            self._kill(why)
            raise EngineLost(f"the engine's answer is invalid: {why}")
        return answer.completions, answer.seconds

    async def _wait_committed(self, completions: Sequence[Completion]) -> None:
        """Wait for the commit of a version that the completions name. Raises `EngineLost` when it failed.

        vLLM draws tokens of a version as soon as it is written, and reads some of its bits back before it answers the
        commit.
        """
        coming = self._coming
        if coming is None or not any(span.version == coming[0] for one in completions for span in one.spans):
            return
        version, ended = coming
        await ended.wait()
        if version not in self._held:
            raise EngineLost("the engine was reloaded: tokens were drawn from a version whose commit failed")

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[tuple[float, ...], Version]:
        """(the log-probability of each of `token_ids` after `prompt`, the version that gave them)."""
        link = self._ready_link()
        self._adapters.check_served(adapter)
        message = Score(link.next_number(), tuple(prompt), tuple(token_ids), sampling, adapter)
        answer = await link.ask(message, Scores, self._deadlines.prove_s)
        if len(answer.logprobs) != len(token_ids):
            self._kill(f"{len(answer.logprobs)} scores for {len(token_ids)} tokens")
            raise EngineLost("the engine's answer is invalid: its scores are not one a token")
        return answer.logprobs, answer.version

    async def judge(self, claim: Claim) -> Judgement:
        """A judgement of tokens that a node says it drew. Calls that overlap share a rewind."""
        link = self._ready_link()
        self._adapters.check_served(claim.adapter)
        try:
            answer = await link.ask(Judge(link.next_number(), claim), Judged, self._deadlines.prove_s)
        except EngineFailed as error:
            if not error.poisoned:
                raise
            await self.reload()
            raise EngineLost(f"the engine was reloaded: {error}") from error
        if why := wrong_judgement(answer.judgement, claim):
            self._kill(why)
            raise EngineLost(f"the engine's answer is invalid: {why}")
        return answer.judgement

    # ------------------------------------------------------------ versions

    async def stage(self, patch_fd: int, version: Version) -> float:
        """Stage the patch to `version` while the engine generates; seconds. `patch_fd` stays the caller's."""
        link = self._ready_link()
        message = Stage(link.next_number(), version)
        return (await link.ask(message, Done, self._deadlines.stage_s, [patch_fd])).seconds

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        """Switch to `version`, which was staged. None: the commit failed, and the engine was reloaded."""
        link = self._ready_link()
        self._coming = version, trio.Event()
        try:
            message = Commit(link.next_number(), version, root)
            done = await link.ask(message, Done, self._deadlines.commit_s)
            self._become(version, root)
            return Commitment(done.seconds, done.resume_s)
        except EngineFailed as error:
            _log.warning("commit_failed", version="{}.{}".format(*version), why=str(error))
        finally:
            self._coming[1].set()
            self._coming = None
        await self.reload()
        return None

    async def reload(self) -> None:
        """Take every bit from the replica again, at the version that it holds now, and prove it.

        A call during a reload waits for that reload.
        """
        if self._reloading.locked():
            async with self._reloading:
                self._ready_link()
                return
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        link = self._ready_link()
        self._mark_not_ready()
        self.reloads += 1
        for _ in range(RELOADS):
            ref = await self._source()
            try:
                message = Reload(link.next_number(), ref.version, ref.root)
                proof = await link.ask(message, Proof, self._deadlines.attach_s)
            except EngineFailed as error:
                self._kill(str(error))
                raise EngineLost("the engine cannot be reloaded; it is being started again") from error
            if proof.root == ref.root:
                await self._adapters.give_all(link)
                self._mark_ready(ref, proof)
                return
        self._kill("its live parameters are not the replica's bits")
        raise EngineLost("the engine cannot be reloaded; it is being started again")

    async def read_blocks(self, blocks: Sequence[int]) -> None:
        """Have the engine write the live bits of these blocks into the window of its `ReplicaRef`."""
        link = self._ready_link()
        await link.ask(Read(link.next_number(), tuple(blocks)), Done, self._deadlines.prove_s)

    async def prove(self) -> bytes:
        """The root of the live parameters, read back out of the engine."""
        link = self._ready_link()
        return (await link.ask(Prove(link.next_number()), Proof, self._deadlines.prove_s)).root

    # ------------------------------------------------------------ adapters

    @property
    def adapters(self) -> dict[str, Version]:
        """The adapters that the engine serves, by name, with the version that it holds of each."""
        return self._adapters.served

    async def set_adapter(
        self, slot: int, config: AdapterConfig, fd: int, version: Version, root: bytes
    ) -> float | None:
        """Serve this version of an adapter, now and after every restart and reload of the engine.

        `fd`: the slot's weights tensor in sealed memory; it stays the caller's. `version`: the swarm's, that last
        changed the adapter. `root`: `part_root` of its slot. Returns the seconds in which the engine computed no token;
        None when it is not ready, and gets the adapter once it is. Raises `EngineFailed`, with a sentence, for an
        adapter that the engine cannot serve; it serves the version before, if it has one, until its next restart.
        """
        try:
            return await self._adapters.set(slot, config, fd, version, root)
        except EngineFailed as error:
            if not error.poisoned:
                raise
            await self.reload()  # which gives it the adapter again
            return None

    async def drop_adapter(self, slot: int) -> None:
        """Forget the slot's adapter, if it has one. Its running sequences fail."""
        await self._adapters.drop(slot)

    async def prove_adapter(self, slot: int) -> bytes:
        """The root of the slot, of the live bits read back out of the engine; `EngineFailed` for an empty slot."""
        return await self._adapters.prove(slot)

    async def prove_adapters(self) -> bool:
        """Whether the live bits of every adapter that the engine serves are those that were given."""
        return await self._adapters.prove_all()
