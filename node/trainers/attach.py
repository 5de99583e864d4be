"""From a model and a seed's folder to a place at the seed's desk: by one process, or by all ranks together."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from codec.errors import UsageError
from node.trainers.connection.link import Link, RankInfo
from node.trainers.connection.seedlink import SeedProcess, dial
from node.trainers.errors import SwarmDown
from node.trainers.ranks.copies import Copies
from node.trainers.ranks.ownership import Ownership
from node.trainers.ranks.peers import Peers
from node.trainers.tensors.weights import check_names, is_sharded

__all__ = ["Attached", "attach", "default_threads"]


class Attached(NamedTuple):
    """What a publish line needs. `seed`: started by this process. `peers`: the processes of all ranks."""

    rank_info: RankInfo
    link: Link
    copies: Copies
    ownership: Ownership
    seed: SeedProcess | None
    peers: Peers


def default_threads(world: int) -> int:
    """Encoders of each of `world` ranks: half the cores between them, so that the trainer keeps the other half."""
    return max(1, min(4, (os.cpu_count() or 2) // 2 // world))


def attach(model: Any, home: Path, base: Path | None) -> Attached:
    """`base`: what to start a seed on where there is none (None: do not). See `Swarm.attach` for what it raises."""
    if model is not None and any(is_sharded(p) for p in getattr(model, "parameters", list)()):
        return _attach_ranks(model, home, base)
    rank_info = RankInfo(home, os.urandom(16))
    seed = _find_or_start(home, base)
    try:
        link = Link(rank_info)
        if model is not None:
            check_names(link.replica.layout, model)
        ownership = Ownership.alone(link.replica.layout)
        return Attached(rank_info, link, Copies.create(link.replica.layout, 1), ownership, seed, Peers())
    except BaseException:
        if seed is not None:
            seed.stop()
        raise


def _attach_ranks(model: Any, home: Path, base: Path | None) -> Attached:
    """Every step on every rank, or on none: an error of one is raised by all."""
    from node.trainers.tensors.fsdp2 import Ranks, sharded_over

    ranks = Ranks(sharded_over(model))
    seed: SeedProcess | None = None

    def find() -> None:
        nonlocal seed
        seed = _find_or_start(home, base)

    try:
        ranks.lead(find)
        rank_info = RankInfo(home, ranks.lead(lambda: os.urandom(16)), ranks.rank, ranks.world)
        link = ranks.gather_own(lambda: Link(rank_info))
        layout = link.replica.layout
        ownership = Ownership(layout, ranks.gather(lambda: check_names(layout, model)))
        made = Copies.create(layout, rank_info.world) if rank_info.leads else None
        owner = ranks.lead(lambda: (os.getpid(), _shared(made)))
        copies = ranks.gather_own(lambda: made or Copies.open(layout, rank_info.world, owner))
        return Attached(rank_info, link, copies, ownership, seed, Peers(ranks.gather(os.getpid)))
    except BaseException:
        if seed is not None:
            seed.stop()
        raise
    finally:
        ranks.close()


def _shared(copies: Copies | None) -> int:
    if copies is None or copies.fd is None:
        raise UsageError("This system has no memfds, so ranks cannot share memory; use Linux.")
    return copies.fd


def _find_or_start(home: Path, base: Path | None) -> SeedProcess | None:
    """The seed that this process had to start, serving; None when there was one."""
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
