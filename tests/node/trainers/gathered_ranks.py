"""The code of each rank of `test_gathered.py`."""

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from node.trainers.gathered import in_parts, whole_tensors


def model() -> torch.nn.Module:
    """Two layers, of which the second ties its weight to the first."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, bias=False))
    layers[1].weight = layers[0].weight
    return layers


def gather(rank: int, world: int) -> tuple[bool, bool, list[str], bool]:
    """Whether the model is in parts before and after it is sharded, the names, and whether the tensors are whole."""
    ours, theirs = model(), dict(model().state_dict())
    before = in_parts(ours)
    fully_shard(ours)
    found: list[tuple[str, Any]] = [(name, tensor) for name, tensor in whole_tensors(ours)]
    same = all(torch.equal(tensor, theirs[name]) and not tensor.requires_grad for name, tensor in found)
    return before, in_parts(ours), [name for name, _ in found], same
