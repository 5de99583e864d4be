"""The process in which rewards are computed: `python -m node.rewards.worker`, started by `node.rewards.host`.

It computes one reward at a time, and knows no deadline: the node kills it with its children when one takes too long.
What the functions print is lost.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, close_fds
from node.rewards.functions import NamedReward, load
from node.rewards.messages import Compute, Computed, Offered, Prepared, ToWorker, Unusable
from node.rewards.outcome import Outcome, evaluate
from node.rewards.texts import NO_TOKENIZER, Texts

__all__ = ["main"]

LOOK_S: Final = 1.0
"""Between two looks whether the node is there."""
IDLE_S: Final = 3600.0
"""The longest wait for a sample; then it waits again."""


def main() -> None:
    """Load the functions, then compute until the node hangs up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the socket to the node")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model's tokenizer")
    parser.add_argument("--memory-mb", type=int, required=True)
    parser.add_argument("--reward", action="append", default=[])
    args = parser.parse_args()
    _limit_memory(args.memory_mb << 20)
    with Channel(socket.socket(fileno=args.socket), ToWorker) as channel, contextlib.suppress(ChannelClosed):
        try:
            rewards, unusable = load(args.reward)
        except UsageError as error:
            channel.send(Unusable(str(error)[:1000]))
            return
        channel.send(Offered(tuple(reward.ability for reward in rewards.values()), unusable))
        threading.Thread(target=_end_with_node, args=(channel,), daemon=True).start()
        _serve(channel, rewards, Texts(args.model))


def _serve(channel: Channel, rewards: Mapping[str, NamedReward], texts: Texts) -> None:
    while True:
        try:
            message, fds = channel.recv(IDLE_S)
        except ChannelTimeout:
            continue
        close_fds(fds)
        if isinstance(message, Compute):
            channel.send(Computed(message.number, *_compute(message, rewards, texts)))
        else:
            with contextlib.suppress(UsageError):  # each sample says why there is no text
                texts.load()
            channel.send(Prepared())


def _end_with_node(channel: Channel) -> None:
    """End this process and all that it started once the node has gone, also in the middle of a function."""
    while not channel.hung_up():
        time.sleep(LOOK_S)
    os.killpg(0, signal.SIGKILL)


def _compute(asked: Compute, rewards: Mapping[str, NamedReward], texts: Texts) -> Outcome:
    if (reward := rewards.get(asked.name)) is None:
        return Outcome.without(f"this node has no reward {asked.name}", lost=True)
    try:
        prompt, completion = texts.of(asked.prompt, asked.token_ids)
        metadata = json.loads(asked.metadata)
    except MemoryError:
        return Outcome.without("the texts need more memory than they may have", lost=True)
    except UsageError as error:
        return Outcome.without(str(error), lost=str(error) != NO_TOKENIZER)
    except (ValueError, RecursionError) as error:
        return Outcome.without(f"its metadata cannot be read: {error}")
    if not isinstance(metadata, dict):
        return Outcome.without("its metadata is no JSON object")
    return evaluate(reward.function, prompt, completion, metadata)


def _limit_memory(limit_bytes: int) -> None:
    """Bound the address space of this process and of those that it starts, where the system can."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
