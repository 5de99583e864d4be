"""The code that the ranks of `test_waits_ranks.py` run: one of them lags, is alone, or is killed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fsdp2_ranks import make_net, sharded

from codec.errors import SwarmError
from node import Swarm
from node.trainers.publish import encoding
from node.trainers.ranks import meeting, progress

SOON_S = 0.5
FAR_S = 120.0


def error_text(call: Any) -> str:
    """The type and text of the error that a call raises."""
    try:
        call()
    except SwarmError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def only_one_publishes(rank: int, world: int, home: str, publisher: int) -> list[str]:
    """Only one of the ranks publishes. Its errors name the others."""
    encoding.COPIED_WITHIN_S, progress.RECONNECT_S = 2.0, 0.2
    net = sharded(make_net(), mixed=False)
    swarm = Swarm.attach(net, home=home)
    swarm.publish(net, step=0).wait(timeout_s=FAR_S)  # so that the encoders are loaded before the deadlines
    errors = []
    if rank == publisher:
        publications = []

        def publish() -> None:
            publications.append(swarm.publish(net, step=len(publications) + 1, timeout_s=SOON_S))

        errors = [error_text(publish) for _ in range(3)]
        if publications:
            errors.append(error_text(lambda: publications[0].wait(timeout_s=SOON_S)))
            errors.append(error_text(lambda: publications[0].wait(timeout_s=FAR_S)))
    dist.barrier()
    error_text(lambda: swarm.close(timeout_s=0.1))
    return errors


def only_one_attaches(rank: int, world: int, home: str) -> str:
    """Rank 0 attaches and no other does."""
    meeting.MEET_WITHIN_S = SOON_S
    net = sharded(make_net(), mixed=False)
    error = error_text(lambda: Swarm.attach(net, home=home)) if rank == 0 else ""
    dist.barrier()
    return error


def one_is_killed(rank: int, world: int, home: str, victim: int, stopped: str) -> list[str]:
    """One rank is killed while the others wait for it. They get an error long before any deadline."""
    net = sharded(make_net(), mixed=False)
    swarm = Swarm.attach(net, home=home)
    swarm.publish(net, step=1).wait(timeout_s=FAR_S)
    if rank == victim:
        Path(stopped).touch()
        time.sleep(0.5)  # usually the others wait by now; if not, they find the rank dead
        os.kill(os.getpid(), signal.SIGKILL)
    while not Path(stopped).exists():
        time.sleep(0.01)
    began = time.monotonic()
    error = error_text(lambda: swarm.publish(net, step=2, timeout_s=FAR_S).wait(timeout_s=FAR_S))
    assert time.monotonic() - began < FAR_S / 2
    error_text(lambda: swarm.close(timeout_s=0.1))
    return [error]
