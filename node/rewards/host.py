"""The node's side of the processes in which rewards are computed.

A process computes one reward at a time. One that takes too long is killed with everything that it started; that costs
the sample that it was computing, and nothing else. One that ended is replaced, and the new one gets the same sample,
once: the system or a person may have killed it, which is no fault of the sample.
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import trio

from codec.errors import PeerError, UsageError
from node.engines.base import RewardAsked
from node.host.child import child_environment, python_module
from node.ipc.async_channel import AsyncChannel
from node.ipc.channel import ChannelClosed, close_fds
from node.rewards.functions import built_in, installed
from node.rewards.messages import Compute, Computed, FromWorker, Offered, Prepare, Prepared, Unusable
from node.rewards.outcome import Outcome
from node.settings.event_log import EventLog
from swarm.guard import Seldom

__all__ = ["RewardHost", "RewardLimits"]

PROCESSES: Final = 2
"""Rewards that are computed at a time, each in a process of its own: one that hangs leaves the other."""
SAME_EVERYWHERE: Final = {
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""Variables of a process, so that sets have one order and sums one rounding on all machines; threads would also take
address space."""
LOAD_WITHIN_S: Final = 300.0
"""For the import of the functions' modules, which may be large."""
END_WITHIN_S: Final = 2.0
"""For a killed process to end."""

_log = EventLog(__name__)


class RewardLimits(NamedTuple):
    """`within_s`: for one reward. `memory_mb`: address space of a process."""

    within_s: float = 10.0
    memory_mb: int = 4096


LIMITS: Final = RewardLimits()


class RewardHost:
    """The rewards of a node. `run` holds the processes; `compute` may be called from any task meanwhile."""

    def __init__(self, given: Sequence[str], model: Path, limits: RewardLimits = LIMITS) -> None:
        """`given`: what the operator named (`node.rewards.functions`). `model`: the folder of the model's tokenizer,
        which is read at the first sample."""
        self._given, self._model, self._limits = tuple(given), model, limits
        self._abilities = frozenset(reward.ability for reward in built_in().values())
        self._idle: list[_Process] = []
        self._room = trio.Semaphore(PROCESSES)
        self._seldom = Seldom()
        self.computed = 0
        self.failed = 0
        """Of those computed, the ones without a number."""

    @property
    def abilities(self) -> frozenset[str]:
        """What this node declares: see `NamedReward.ability`."""
        return self._abilities

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the processes until cancelled. `started()` once the functions are known.

        Raises `UsageError` for a function of the operator's that cannot be used.
        """
        try:
            if self._given or installed():  # what is built in needs no process to tell its digest
                process, offered = await self._start()
                self._idle.append(process)
                self._abilities = frozenset(offered.abilities)
                for why in offered.unusable:
                    _log.warning("reward_unusable", why=why)
            task_status.started()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                for process in self._idle:
                    await process.end()
            self._idle.clear()

    async def compute(self, asked: RewardAsked, prompt: Sequence[int], token_ids: Sequence[int]) -> Outcome:
        """The reward of `token_ids`, which follow `prompt`. Never raises, and takes at most the limit of time, and that
        of a process's start; twice where the process ends."""
        name = asked.name.partition("@")[0]
        message = Compute(0, name, tuple(prompt), tuple(token_ids), asked.metadata)
        async with self._room:
            outcome = await self._compute(message) or await self._compute(message)
        if outcome is None:
            outcome = Outcome.without("its process ended", lost=True)
        self.computed += 1
        if outcome.value is None:
            self.failed += 1
            if self._seldom.due("reward_failed") is not None:
                _log.warning("reward_failed", reward=name, why=outcome.why)
        return outcome

    async def _compute(self, message: Compute) -> Outcome | None:
        """The outcome of one sample; None: the process that computed it ended."""
        try:
            process = self._idle.pop() if self._idle else (await self._start())[0]
        except (UsageError, ChannelClosed, PeerError, OSError) as error:
            return Outcome.without(f"its process did not start: {error}", lost=True)
        try:
            with trio.move_on_after(LOAD_WITHIN_S):
                await process.prepare()
            with trio.move_on_after(self._limits.within_s):
                outcome = await process.compute(message)
                self._idle.append(process)
                return outcome
            return Outcome.without(f"it took more than {self._limits.within_s:g} s", lost=True)
        except (ChannelClosed, PeerError):
            return None
        finally:
            if process not in self._idle:
                await process.end()

    async def _start(self) -> "tuple[_Process, Offered]":
        """A process that has loaded the functions. Raises `UsageError`, `ChannelClosed`, `PeerError`, `OSError`."""
        process = await _Process.start(self._given, self._model, self._limits.memory_mb)
        try:
            with trio.fail_after(LOAD_WITHIN_S):
                first = await process.receive()
        except trio.TooSlowError:
            await process.end()
            raise UsageError(f"--reward: the functions were not loaded within {LOAD_WITHIN_S:.0f} s") from None
        except ChannelClosed:
            await process.end()
            raise UsageError("--reward: the process that loads the functions ended") from None
        except BaseException:
            await process.end()
            raise
        if isinstance(first, Offered):
            return process, first
        await process.end()
        if isinstance(first, Unusable):
            raise UsageError(first.why)
        raise PeerError("reward: a process began with something else than its functions")


class _Process:
    """One process, and the socket to it."""

    def __init__(self, process: Any, channel: AsyncChannel) -> None:
        self._process, self._channel = process, channel
        self._number, self._prepared = 0, False

    @classmethod
    async def start(cls, given: Sequence[str], model: Path, memory_mb: int) -> "_Process":
        """Start it. What it prints is lost."""
        ours, theirs = socket.socketpair()
        with theirs:
            words = ["--socket", str(theirs.fileno()), "--model", str(model), "--memory-mb", str(memory_mb)]
            command = python_module("node.rewards.worker", *words, *(f"--reward={text}" for text in given))
            try:
                process = await trio.lowlevel.open_process(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),), start_new_session=True,
                    env=child_environment() | SAME_EVERYWHERE,
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        return cls(process, AsyncChannel.adopt(ours, FromWorker))

    async def receive(self) -> Any:
        """The next message. Raises `ChannelClosed`, `PeerError`."""
        message, fds = await self._channel.recv()
        close_fds(fds)
        return message

    async def prepare(self) -> None:
        """Have it load what the first sample needs. Raises `ChannelClosed`, `PeerError`."""
        if not self._prepared:
            await self._channel.send(Prepare())
            if not isinstance(await self.receive(), Prepared):
                raise PeerError("reward: an answer to something else")
            self._prepared = True

    async def compute(self, message: Compute) -> Outcome:
        """The outcome of one sample. Raises `ChannelClosed`, and `PeerError` for an invalid answer."""
        self._number += 1
        await self._channel.send(msgspec.structs.replace(message, number=self._number))
        answer = await self.receive()
        if not isinstance(answer, Computed) or answer.number != self._number:
            raise PeerError("reward: an answer to something else")
        if answer.value is None:
            return Outcome.without(answer.why, lost=answer.lost)
        if not math.isfinite(answer.value):
            raise PeerError("reward: not a finite number")
        return Outcome(answer.value)

    async def end(self) -> None:
        """Kill it with everything that it started, and wait for its end."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True), trio.move_on_after(END_WITHIN_S):
            await self._process.wait()
