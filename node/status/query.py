"""Asks the swarm process of this machine for its status: one question, one answer over `SWARM_HOME/status.sock`."""

import os
import pwd
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from codec.errors import PeerError
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.ipc.channel import ChannelClosed, ChannelTimeout, close_fds, connect
from node.status.schema import Status
from node.status.sleeping import SOCKET_NAME, Rested, Sleep, Wake
from swarm.guard import Source
from swarm.transport.base import Unreachable

__all__ = ["SOCKET_NAME", "StateAnswer", "StatusQuery", "ask", "serve"]

ANSWER_WITHIN_S: Final = 10.0
"""A swarm process answers between two events of its core; one that takes longer than this is stuck."""

ASK_WITHIN_S: Final = 60.0
"""A process that connects asks at once; one that does not is disconnected."""
PROOF_WITHIN_S: Final = 120.0
"""An engine reads back and hashes a gigabyte or more a second, between two batches."""


class StatusQuery(msgspec.Struct, frozen=True, tag="ask"):
    """Asks for the status. `prove`: first read the bits back out of the engine, and report the root of those."""

    prove: bool = False


class StateAnswer(msgspec.Struct, frozen=True, tag="state"):
    """The status at the moment of the question."""

    state: Status


async def _nothing_to_prove() -> None:
    await trio.lowlevel.checkpoint()


async def _no_engines(request: Sleep | Wake) -> Rested:
    await trio.lowlevel.checkpoint()
    return Rested(why="There is no engine here: name the home of a node that has one (--home).")


async def serve(
    home: Path,
    status: Callable[[], Status],
    prove: Callable[[], Awaitable[None]] = _nothing_to_prove,
    rest: Callable[[Sleep | Wake], Awaitable[Rested]] = _no_engines,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer questions until cancelled.

    `status()` is called for each question and must be quick. `prove()` is awaited before that when the question asks
    for a proof; it may take minutes, and its result shows in `status()`. `rest()` puts the engines to sleep or wakes
    them. Raises `UsageError` when another process serves this home.
    """

    async def converse(channel: AsyncChannel) -> None:
        while True:
            with trio.fail_after(ASK_WITHIN_S):
                question, fds = await channel.recv()
            close_fds(fds)
            if isinstance(question, Sleep | Wake):
                await channel.send(await rest(question))
                continue
            if question.prove:
                await prove()
            await channel.send(StateAnswer(status()))

    await serve_socket(
        home / SOCKET_NAME, converse, receives=StatusQuery | Sleep | Wake, source=Source.STATUS, task_status=task_status
    )


def _other_owner(home: Path) -> str:
    """The name of the user to whom `home`, or the nearest folder above it that can be seen, belongs, where this user
    may not look into it; empty: it is this user's, or is not there."""
    for folder in (home, *home.parents):
        try:
            found = folder.stat()
        except PermissionError:
            continue  # the folder above it is closed
        except OSError:
            return ""
        if found.st_uid == os.geteuid() or (folder != home and os.access(folder, os.X_OK)):
            return ""
        try:
            return pwd.getpwuid(found.st_uid).pw_name
        except KeyError:
            return str(found.st_uid)
    return ""


def ask(home: Path, *, prove: bool = False, within_s: float = ANSWER_WITHIN_S) -> Status:
    """The status of the swarm process of `home`. Raises `Unreachable` when none answers within `within_s` seconds.

    With `prove` the answer may take `PROOF_WITHIN_S`.
    """
    try:
        with connect(home / SOCKET_NAME, StateAnswer) as channel:
            channel.send(StatusQuery(prove), timeout_s=within_s)
            answer, _ = channel.recv(PROOF_WITHIN_S if prove else within_s)
            return answer.state
    except (ChannelClosed, ChannelTimeout, PeerError) as error:
        if owner := _other_owner(home):
            raise Unreachable(
                f"{home} belongs to the user {owner}, and a swarm process answers its own user only. Ask as that user: "
                f"sudo -u {shlex.quote(owner)} swarm-node status --home {shlex.quote(str(home))}"
            ) from error
        raise Unreachable(
            f"No swarm process answers in {home} ({error}). Start one (swarm-node seed, join or relay), "
            "or name the home of one that runs: --home, or SWARM_HOME."
        ) from error
