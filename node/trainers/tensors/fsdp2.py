"""FSDP2 (`torch.distributed.fsdp.fully_shard`): which part each rank holds, and how the ranks of one trainer meet.

After attaching nothing here talks: the ranks agree through memory that they share (`node.trainers.ranks.copies`), so
the trainer's own collectives are never disturbed, and a rank that dies takes no publish with it into a hang.
"""

import datetime
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from codec.errors import SwarmError, UsageError
from node.trainers.connection.patience import Wait, saying
from node.trainers.errors import SwarmTimeout
from node.trainers.ranks.ownership import Part
from node.trainers.ranks.peers import have, named
from node.trainers.tensors.naming import is_sharded

__all__ = ["Ranks", "part_of", "sharded_over"]

T = TypeVar("T")
MEET_WITHIN_S: Final = 900.0
"""A seed that rank 0 starts hashes the base first; the others wait for it."""
_MEETINGS: Final = itertools.count()
"""Every rank attaches equally often, so the number of the meeting is the same on all."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def sharded_over(model: Any) -> list[int]:
    """The processes that hold this model's shards, by their rank; empty when it is not sharded.

    Raises `UsageError` when its tensors are sharded over different sets of processes.
    """
    if not hasattr(model, "parameters"):
        return []
    meshes = {tuple(p.device_mesh.mesh.flatten().tolist()) for p in model.parameters() if is_sharded(p)}
    if len(meshes) > 1:
        raise UsageError("The model's tensors are sharded over different sets of ranks: shard all of them over all.")
    return sorted(meshes.pop()) if meshes else []


def part_of(name: str, tensor: Any) -> tuple[Part | None, Any]:
    """This process's part of a DTensor, and its elements. Raises `UsageError` for what lies otherwise than in rows.

    One dimension of the mesh may shard one of the tensor's, in torch's way: as `torch.chunk` cuts it, so that the last
    ranks may hold less, or nothing. The others replicate (HSDP).
    """
    local = tensor.to_local()
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    known = _PARTS.get(name)
    if known is not None and known[:3] == (id(mesh), placements, shape):
        part = known[4]
    else:
        part = _part_of(name, mesh, placements, shape)
        if len(_PARTS) >= _PARTS_KEPT:
            _PARTS.clear()
        _PARTS[name] = id(mesh), placements, shape, mesh, part
    if part is not None and local.shape[part.dim] != part.length:
        raise UsageError(f"{name}: this rank holds {tuple(local.shape)} of {tuple(shape)}, which cannot be.")
    return part, local


_PARTS: Final[dict[str, tuple[int, Any, Any, Any, Part | None]]] = {}
"""By name: of which mesh (kept, so that its id stays its own), placements and shape, and the part. The mesh's own
answers take tens of microseconds for each tensor of each publish."""
_PARTS_KEPT: Final = 1 << 17


def _part_of(name: str, mesh: Any, placements: Any, shape: Any) -> Part | None:
    sharded = [(i, placement) for i, placement in enumerate(placements) if not placement.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or not type(sharded[0][1]).__name__ == "Shard":
        raise UsageError(
            f"{name} is sharded as {placements}. One dimension of a tensor over one of the mesh can be "
            "published; else publish an iterator of (checkpoint name, full tensor) from one rank."
        )
    mesh_dim, placement = sharded[0]
    size, world = shape[placement.dim], mesh.size(mesh_dim)
    rows = -(-size // world)
    start = min(mesh.get_local_rank(mesh_dim) * rows, size)
    return Part(placement.dim, start, min(rows, size - start))


class Ranks:
    """The processes of one trainer while they attach: every step is taken by all, and fails on all."""

    def __init__(self, ranks: list[int]) -> None:
        """`ranks`: see `sharded_over`. A collective: every process of the trainer makes one. Raises `UsageError`."""
        import torch.distributed as dist

        if ranks != list(range(dist.get_world_size())):
            raise UsageError("The model is sharded over some of the processes only: shard it over all of them.")
        self.rank, self.world = dist.get_rank(), len(ranks)
        self._dist = dist
        self._meet()
        self._group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=MEET_WITHIN_S))
        hosts = self.gather(_BOOT_ID.read_text().strip)
        if len(set(hosts)) > 1:
            raise UsageError(
                f"The ranks are on {len(set(hosts))} hosts. In this version a trainer publishes from one host: shard "
                "within it, or publish an iterator of (checkpoint name, full tensor) from one rank."
            )

    def gather(self, ask: Callable[[], T]) -> list[T]:
        """What `ask()` gave on each rank. Where it raised a `SwarmError`, every rank raises the first."""
        answer: tuple[Any, SwarmError | None]
        try:
            answer = ask(), None
        except SwarmError as error:
            answer = None, error
        answers: list[Any] = [None] * self.world
        self._talk(lambda: self._dist.all_gather_object(answers, answer, group=self._group))
        for _, error in answers:
            if error is not None:
                raise answer[1] or error
        return [value for value, _ in answers]

    def gather_own(self, make: Callable[[], T]) -> T:
        """What `make()` gave on this rank; where it raised a `SwarmError` on any, every rank raises it."""
        made: list[T] = []
        self.gather(lambda: made.append(make()))
        return made[0]

    def lead(self, do: Callable[[], T]) -> T:
        """What `do()` gave on rank 0, which alone runs it; its `SwarmError` comes out on every rank."""
        return self.gather(do if self.rank == 0 else lambda: None)[0]  # pyright: ignore[reportReturnType]

    def _meet(self) -> None:
        """Until every rank has come, found by keys in the trainer's own store: a collective could not say who lacks.

        Raises `SwarmTimeout` naming the ranks that have not."""
        store = self._dist.distributed_c10d._get_default_store()
        key = f"swarm-node/attach/{next(_MEETINGS)}"
        store.set(f"{key}/{self.rank}", "here")
        missing = list(range(self.world))
        wait = Wait(
            MEET_WITHIN_S,
            lambda: f"attach waits for {named(missing, self.world)}, which {have(missing)} not called it",
        )
        while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
            if wait.over:
                raise SwarmTimeout(
                    f"{named(missing, self.world).capitalize()} {have(missing)} not called Swarm.attach within "
                    f"{MEET_WITHIN_S:.0f} s of this one. Call it on every rank."
                )
            wait.say()
            time.sleep(wait.slice_s())

    def close(self) -> None:
        """They have met; from here on they only share memory."""
        self._dist.destroy_process_group(self._group)

    def _talk(self, collective: Callable[[], None]) -> None:
        try:
            with saying(MEET_WITHIN_S, lambda: "attach waits for another rank: rank 0 may be starting the seed"):
                collective()
        except RuntimeError as error:
            raise SwarmTimeout(
                f"Another rank ended, or did not answer, while this trainer attached: {error}"
            ) from error
