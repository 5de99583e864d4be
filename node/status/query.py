"""Asking the swarm process of this machine how it stands: one question and one answer over `SWARM_HOME/status.sock`.

The state is a plain dict of plain values, made by the process asked; `terminal` says which keys it shows.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from codec.errors import PeerError
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.ipc.channel import ChannelClosed, ChannelTimeout, close_fds, connect
from swarm.guard import Source
from swarm.transport.base import Unreachable

__all__ = ["SOCKET_NAME", "Ask", "State", "ask", "serve"]

SOCKET_NAME: Final = "status.sock"
ANSWER_WITHIN_S: Final = 10.0
"""A swarm process answers between two events of its core; one that takes longer than this is stuck."""

ASK_WITHIN_S: Final = 60.0
"""A process that connects asks at once; one that does not is let go."""
PROOF_WITHIN_S: Final = 120.0
"""An engine reads back and hashes a gigabyte or more a second, between two batches."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """How do you stand? `prove`: read the bits back out of the engine first, and say what root they add up to."""

    prove: bool = False


class State(msgspec.Struct, frozen=True, tag="state"):
    """Thus."""

    state: dict[str, Any]


async def _nothing_to_prove() -> None:
    await trio.lowlevel.checkpoint()


async def serve(
    home: Path,
    state: Callable[[], dict[str, Any]],
    prove: Callable[[], Awaitable[None]] = _nothing_to_prove,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled; `state()` is called at each question and must be quick. `prove` may take its time, and
    leaves what it found in the state. Raises `UsageError`."""

    async def converse(channel: AsyncChannel) -> None:
        while True:
            with trio.fail_after(ASK_WITHIN_S):
                question, fds = await channel.recv()
            close_fds(fds)
            if question.prove:
                await prove()
            await channel.send(State(state()))

    await serve_socket(home / SOCKET_NAME, converse, receives=Ask, source=Source.STATUS, task_status=task_status)


def ask(home: Path, *, prove: bool = False, within_s: float = ANSWER_WITHIN_S) -> dict[str, Any]:
    """The state of the swarm process of `home`. Raises `Unreachable` when none answers `within_s`."""
    try:
        with connect(home / SOCKET_NAME, State) as channel:
            channel.send(Ask(prove), timeout_s=within_s)
            answer, _ = channel.recv(PROOF_WITHIN_S if prove else within_s)
            return answer.state
    except (ChannelClosed, ChannelTimeout, PeerError) as error:
        raise Unreachable(
            f"No swarm process answers in {home} ({error}). Start one (swarm-node seed, join or relay), "
            "or name the folder of the one that runs: --home, or SWARM_HOME."
        ) from error
