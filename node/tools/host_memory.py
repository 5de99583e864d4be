"""How much host memory each role needs for a model, without its engine: arithmetic on the model's size."""

from dataclasses import dataclass
from typing import Final

from codec.layout import Layout

__all__ = ["HostMemory", "host_memory"]

_PROCESS_BYTES: Final = 150_000_000
"""A process of the swarm that holds nothing: interpreter, libraries, compiled kernels."""
_TRAINER_COPIES: Final = 2
"""Copies of the model in the publishing process's shared memory: `publish` fills one while it encodes the other."""
_STAGED_CHANGE_BYTES: Final = 6
"""A changed bf16 element in scratch memory: its position (u32) and its new bits (u16). See `codec.staging`."""
_STAGED_BLOCK_BYTES: Final = 128
_HASH_BYTES: Final = 32
_PATCH_CHANGE_BYTES: Final = 10
"""A changed element in the patch for an engine."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes at the peak, by role, while one version is on its way.

    `trainer`: the publishing process, beside its own parameters. `seed`: the coordinator with its replica. `node`: a
    member with its replica in memory, and the patch for its engine. `node_on_disk`: the same with the replica on disk.
    `relay`: a member without replica or engine.
    """

    trainer: int
    seed: int
    node: int
    node_on_disk: int
    relay: int


def host_memory(layout: Layout, changed: int) -> HostMemory:
    """`changed`: elements that a step changes."""
    hashes = _HASH_BYTES * layout.n_blocks
    staged = _STAGED_CHANGE_BYTES * changed + _STAGED_BLOCK_BYTES * layout.n_blocks
    member = _PROCESS_BYTES + hashes + staged
    patch = _PATCH_CHANGE_BYTES * changed
    return HostMemory(
        trainer=_PROCESS_BYTES + _TRAINER_COPIES * layout.nbytes,
        seed=member + layout.nbytes,
        node=member + patch + layout.nbytes,
        node_on_disk=member + patch,
        relay=_PROCESS_BYTES,
    )
