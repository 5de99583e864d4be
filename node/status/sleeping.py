"""Has a node of this machine put its engines to sleep, or wake them: one request, one answer over
`SWARM_HOME/status.sock`.

Synchronous and without trio, because trainers use it in their training loop.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from codec.errors import PeerError, SwarmError, UsageError
from node.ipc.channel import ChannelClosed, ChannelTimeout, connect

__all__ = ["MAX_WITHIN_S", "SOCKET_NAME", "NodeAway", "Rested", "Sleep", "Wake", "sleep_engines", "wake_engines"]

SOCKET_NAME: Final = "status.sock"
MAX_WITHIN_S: Final = 86400.0
SEND_WITHIN_S: Final = 10.0
ENDS_WITHIN_S: Final = 120.0
"""For killed engines to give their memory back, and for requests that came before to end."""

Within = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WITHIN_S)]


class NodeAway(SwarmError):
    """No node answers in that home, or it did not answer in time."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Finish the work that is here within this time (s), give the rest back, and free the engines' memory."""

    within_s: Within


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Start the engines, and answer when one is ready, or after this time (s)."""

    within_s: Within


class Rested(msgspec.Struct, frozen=True, tag="rested"):
    """Answer to both. `done`: no work was given back; or an engine is ready. `why`: why nothing was done, in a sentence
    for the user; empty: it was."""

    done: bool = False
    why: str = ""


def sleep_engines(home: Path, within_s: float) -> bool:
    """Free the memory of the engines of the node in `home`. Whether all work that was there was finished in time.

    Raises `UsageError` where there is no engine to put to sleep, and `NodeAway`.
    """
    return _ask(home, Sleep(_checked(within_s)), within_s + ENDS_WITHIN_S)


def wake_engines(home: Path, within_s: float) -> bool:
    """Start the engines of the node in `home` again. Whether one was ready, with proven weights, in time.

    Raises as `sleep_engines` does.
    """
    return _ask(home, Wake(_checked(within_s)), within_s + ENDS_WITHIN_S)


def _checked(within_s: float) -> float:
    if not 0.0 <= within_s <= MAX_WITHIN_S:
        raise UsageError(f"The time limit must be from 0 to {MAX_WITHIN_S:.0f} seconds.")
    return within_s


def _ask(home: Path, request: Sleep | Wake, within_s: float) -> bool:
    try:
        with connect(home / SOCKET_NAME, Rested) as channel:
            channel.send(request, timeout_s=SEND_WITHIN_S)
            answer, _ = channel.recv(within_s)
    except (ChannelClosed, ChannelTimeout, PeerError) as error:
        raise NodeAway(
            f"No node answers in {home} ({error}). Name the home of the node on this machine whose engines share the "
            "GPU with you."
        ) from error
    if answer.why:
        raise UsageError(answer.why)
    return answer.done
