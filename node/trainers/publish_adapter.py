"""Publishes an adapter's folder, lists and removes adapters, for `swarm-node publish --adapter` and its like."""

from functools import partial
from pathlib import Path
from typing import Any

from node.ipc.channel import Channel
from node.trainers.adapter_messages import AdapterRemoved, Adapters, AskAdapters, RemoveAdapter
from node.trainers.attach import attach_adapter, default_threads
from node.trainers.connection.seedlink import ask_state, dial, expect, speaking
from node.trainers.errors import SwarmDown
from node.trainers.file_messages import PUBLISHED_WITHIN_S
from node.trainers.publish.adapter_line import AdapterLine
from node.trainers.standing import holders
from node.trainers.tensors.adapter_slot import check_name
from node.trainers.tensors.plain_lora import read_folder
from swarm.transport.base import Unreachable

__all__ = ["list_adapters", "publish_adapter", "remove_adapter"]


def publish_adapter(home: Path, folder: Path, name: str, *, step: int = 0, everywhere: bool = False) -> dict[str, Any]:
    """Publish the adapter that peft saved in `folder` as the adapter `name`, through the seed of `home`.

    Returns plain values about the version. `everywhere`: also wait until every live node holds it. Needs no torch.
    Raises `Unreachable` without a seed, `UsageError` when the folder is no plain LoRA of the seed's base or there is no
    slot for it, and what `Swarm.publish` and `Publication.wait` raise.
    """
    check_name(name)
    read_folder(folder)  # what is wrong with it is said before a slot is taken
    try:
        ask_state(home)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error
    line = AdapterLine(attach_adapter(home, name, None), default_threads(1), partial(holders, home))
    try:
        publication = line.publish(folder, step, "wait", PUBLISHED_WITHIN_S)
        publication.wait(1.0 if everywhere else 0.0, PUBLISHED_WITHIN_S)
    finally:
        line.line.close(0.0)
    assert publication.root is not None
    return {
        "adapter": name,
        "adapter_version": publication.adapter_version,
        "epoch": publication.epoch,
        "version": publication.version,
        "root": publication.root.hex(),
        "changed": publication.changed,
        "density": publication.density,
        "delta_bytes": publication.bytes,
        "seconds": publication.seconds,
    }


def list_adapters(home: Path) -> Adapters:
    """The adapters of the swarm whose seed is at `home`. Raises `Unreachable` without a seed, `SwarmTimeout`."""
    with speaking("it was asked for its adapters"), _seed_of(home) as channel:
        channel.send(AskAdapters())
        return expect(channel, Adapters)[0]


def remove_adapter(home: Path, name: str) -> AdapterRemoved:
    """Have the seed of `home` publish a version without the adapter `name`.

    Raises `Unreachable` without a seed, `UsageError` when there is no such adapter or a trainer is attached to it,
    `PublishFailed`, `SwarmTimeout`.
    """
    with speaking(f"it was asked to remove the adapter {name}"), _seed_of(home) as channel:
        channel.send(RemoveAdapter(name))
        return expect(channel, AdapterRemoved, PUBLISHED_WITHIN_S)[0]


def _seed_of(home: Path) -> Channel:
    try:
        return dial(home)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error
