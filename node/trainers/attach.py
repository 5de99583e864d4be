"""Attaches a trainer to the seed on its host as a publisher: one process alone, or all ranks of a sharded model."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from codec.errors import UsageError
from node.trainers.connection.link import Link, RankInfo
from node.trainers.connection.seedlink import SeedProcess, dial
from node.trainers.errors import SwarmDown
from node.trainers.ranks.copies import Copies
from node.trainers.ranks.ownership import Ownership
from node.trainers.ranks.peers import RankPeers
from node.trainers.tensors.sharding import is_sharded, sharded_over
from node.trainers.tensors.weights import check_names

__all__ = ["Attachment", "attach", "attach_adapter", "attach_base", "default_threads", "find_or_start"]


class Attachment(NamedTuple):
    """What a publish line needs of an attached trainer. `seed`: the seed, if this process started it. `peers`: the
    processes of all ranks."""

    rank_info: RankInfo
    link: Link
    copies: Copies
    ownership: Ownership
    seed: SeedProcess | None
    peers: RankPeers


def default_threads(world: int) -> int:
    """Encoder threads of each of `world` ranks, 1 to 4: half the cores, divided among the ranks."""
    return max(1, min(4, (os.cpu_count() or 2) // 2 // world))


def attach(model: Any, home: Path, base: Path | None) -> Attachment:
    """Attach to the seed of `home`. `base`: the checkpoint folder to start a seed on if there is none; None: do not.

    For `model`, and for the errors, see `Swarm.attach`.
    """
    if model is not None and any(is_sharded(p) for p in getattr(model, "parameters", list)()):
        return _attach_ranks(model, home, base)
    seed = find_or_start(home, base)
    try:
        return _alone(RankInfo(home, os.urandom(16)), seed, model)
    except BaseException:
        if seed is not None:
            seed.stop()
        raise


def attach_base(home: Path, seed: SeedProcess | None) -> Attachment:
    """Attach this process alone to the seed of `home`, to publish the base; `seed`: if this process started it.

    Raises `SwarmDown`, `SwarmTimeout`, `UsageError`.
    """
    return _alone(RankInfo(home, os.urandom(16)), seed)


def attach_adapter(home: Path, name: str, seed: SeedProcess | None) -> Attachment:
    """As `attach_base`, to publish the adapter `name`. Raises `UsageError` too when it has no slot and none is free,
    `PublishFailed` when another process is attached to it."""
    return _alone(RankInfo(home, os.urandom(16), adapter=name), seed)


def _alone(rank_info: RankInfo, seed: SeedProcess | None, model: Any = None) -> Attachment:
    link = Link(rank_info)
    layout = link.replica.layout
    if model is not None:
        check_names(layout, model)
    return Attachment(rank_info, link, Copies.create(layout, 1), Ownership.alone(layout), seed, RankPeers())


def _attach_ranks(model: Any, home: Path, base: Path | None) -> Attachment:
    """Attach every rank, or none: an error on one rank is raised on all."""
    from node.trainers.ranks.meeting import RankMeeting

    meeting = RankMeeting(sharded_over(model))
    seed: SeedProcess | None = None

    def find() -> None:
        nonlocal seed
        seed = find_or_start(home, base)

    try:
        meeting.lead(find)
        rank_info = RankInfo(home, meeting.lead(lambda: os.urandom(16)), meeting.rank, meeting.world)
        link = meeting.gather_own(lambda: Link(rank_info))
        layout = link.replica.layout
        ownership = Ownership(layout, meeting.gather(lambda: check_names(layout, model, leads=rank_info.leads)))
        created = Copies.create(layout, rank_info.world) if rank_info.leads else None
        owner = meeting.lead(lambda: (os.getpid(), _shared_fd(created)))
        copies = meeting.gather_own(lambda: created or Copies.open(layout, rank_info.world, owner))
        return Attachment(rank_info, link, copies, ownership, seed, RankPeers(meeting.gather(os.getpid)))
    except BaseException:
        if seed is not None:
            seed.stop()
        raise
    finally:
        meeting.close()


def _shared_fd(copies: Copies | None) -> int:
    if copies is None or copies.fd is None:
        raise UsageError("This system has no memfds, so ranks cannot share memory; use Linux.")
    return copies.fd


def find_or_start(home: Path, base: Path | None) -> SeedProcess | None:
    """None when a seed serves `home`; else the seed that this call has started on `base`, once it serves.

    Raises `UsageError` when there is none and `base` is None, or it does not start; `SwarmTimeout`.
    """
    try:
        dial(home).close()
        return None
    except SwarmDown:
        if base is None:
            raise UsageError(
                f"No seed serves {home}. Start one (swarm-node seed --base FOLDER), or give Swarm.attach the base "
                "folder, and it will."
            ) from None
    seed = SeedProcess(home, base)
    seed.wait_until_serving()
    return seed
