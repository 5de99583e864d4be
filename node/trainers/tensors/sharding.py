"""How FSDP2 (`torch.distributed.fsdp.fully_shard`) shards a tensor: which part of it this process holds.

Works on DTensors by their attributes, so it imports nothing of torch.
"""

from typing import Any, Final

from codec.errors import UsageError
from node.trainers.ranks.ownership import TensorPart

__all__ = ["is_sharded", "part_of", "sharded_over"]


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor on a mesh of more than one process."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and tensor.device_mesh.size() > 1


def sharded_over(model: Any) -> list[int]:
    """The ranks that hold this model's shards, ascending; empty when it is not sharded.

    Raises `UsageError` when its tensors are sharded over different sets of processes.
    """
    if not hasattr(model, "parameters"):
        return []
    meshes = {tuple(p.device_mesh.mesh.flatten().tolist()) for p in model.parameters() if is_sharded(p)}
    if len(meshes) > 1:
        raise UsageError("The model's tensors are sharded over different sets of ranks: shard all of them over all.")
    return sorted(meshes.pop()) if meshes else []


def part_of(name: str, tensor: Any) -> tuple[TensorPart | None, Any]:
    """This process's part of a DTensor, and the local tensor with its elements. The part is None for the whole tensor.

    One dimension of the mesh may shard one dimension of the tensor, as `torch.chunk` cuts it: the last ranks may hold
    less, or nothing. The mesh's other dimensions must replicate (HSDP). Raises `UsageError` naming the tensor for any
    other sharding.
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
        raise UsageError(
            f"{name}: this rank holds {tuple(local.shape)} of {tuple(shape)}, which is not how torch.chunk cuts it."
        )
    return part, local


_PARTS: Final[dict[str, tuple[int, Any, Any, Any, TensorPart | None]]] = {}
"""Cache by tensor name: id of the mesh, placements, shape, the mesh (held, so that its id is not reused), and the part.
Asking the mesh takes tens of microseconds for each tensor of each publish."""
_PARTS_KEPT: Final = 1 << 17
"""Entries at which the cache is emptied: far more tensors than a model has."""


def _part_of(name: str, mesh: Any, placements: Any, shape: Any) -> TensorPart | None:
    sharded = [(i, placement) for i, placement in enumerate(placements) if not placement.is_replicate()]
    if not sharded:
        return None
    if len(sharded) > 1 or not type(sharded[0][1]).__name__ == "Shard":
        raise UsageError(
            f"{name} is sharded as {placements}. Only tensors with one dimension sharded over one dimension of the "
            "mesh can be published. For others, publish an iterator of (checkpoint name, full tensor) from one rank."
        )
    mesh_dim, placement = sharded[0]
    size, world = shape[placement.dim], mesh.size(mesh_dim)
    rows = -(-size // world)
    start = min(mesh.get_local_rank(mesh_dim) * rows, size)
    return TensorPart(placement.dim, start, min(rows, size - start))
