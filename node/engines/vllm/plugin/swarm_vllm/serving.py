"""The thread of a worker process that answers its driver while the engine's steps go on.

The rank of any engine serves by it: it needs neither vLLM nor any other engine.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .channel import Channel, Closed
from .messages import Compare, Did, Differs, Failed, Gather, Loaded, Sources, Stage, Unchanged
from .shared import map_scratch, map_sealed
from .weights import LiveWeights

__all__ = ["serve_driver"]

_LOW_PRIORITY = 19
"""The niceness of the thread that stages. At equal priority it would delay a step each time it runs."""
_SWITCH_S = 0.0002
"""Seconds after which a thread gives up the interpreter. With Python's default of 5 ms the generating thread would wait
so long at every kernel."""

Other = Callable[[Any, list[int]], Any]
"""Answers a message that is about something else than weights, whose descriptors are its to close. Raises
`RuntimeError` for a message that no rank answers."""


def serve_driver(channel: Channel, weights: LiveWeights, other: Other) -> None:
    """Start the thread. It ends when the driver is gone."""
    threading.Thread(target=_serve, args=(channel, weights, other), name="swarm", daemon=True).start()


def _serve(channel: Channel, weights: LiveWeights, other: Other) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
    sys.setswitchinterval(_SWITCH_S)
    try:
        while True:
            message, fds = channel.recv()
            started = time.perf_counter()
            try:
                answer = _answer(weights, message, fds, started, other)
            except Closed:
                raise
            except Exception as error:  # the driver decides what to do
                answer = Failed(message.number, f"{type(error).__name__}: {error}")
            channel.send(answer)
    except Closed:
        channel.close()


def _answer(weights: LiveWeights, message: Any, fds: list[int], started: float, other: Other) -> Any:
    match message:
        case Stage():
            weights.stage(map_sealed(fds[0]), message.version, frozenset(message.scattered))
        case Gather():
            with weights.rewind.reading():
                weights.gather(message.parts, map_scratch(fds[0]))
        case Compare():
            with weights.rewind.reading():
                return Differs(message.number, tuple(weights.differing(message.parts, map_scratch(fds[0]))))
        case Loaded():
            return Sources(message.number, dict(weights.sources))
        case Unchanged():
            with weights.rewind.reading():
                return Differs(message.number, tuple(weights.changed(message.names)))
        case _:
            return other(message, fds)
    return Did(message.number, time.perf_counter() - started)
