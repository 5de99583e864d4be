"""Reads changed blocks out of a rank's ring: the coded form for the swarm, the list of changes for the seed's replica.

The trainer is trusted with the bits; but it may have a bug, and a position beyond a block would be written beyond the
replica. So lengths and positions are checked here, in a copy that the trainer cannot change any more.
"""

import numpy as np

from codec import BlockDelta, Layout, StagedBlock
from codec.errors import PeerError
from codec.part_view import PartView
from node.ipc.ring import RingReader
from node.trainers.messages import SharedDelta

__all__ = ["read_shared", "record_end"]

_POSITION_BYTES = 4


def record_end(delta: SharedDelta, layout: Layout) -> int:
    """The place in the ring after this block's record."""
    return delta.at + delta.listed * (_POSITION_BYTES + _itemsize(delta, layout)) + delta.payload


def read_shared(delta: SharedDelta, ring: RingReader, replica: PartView) -> tuple[BlockDelta, StagedBlock | None]:
    """The block's delta, and what it changes, if that is listed. Raises `PeerError` for what no trainer sends."""
    layout = replica.layout
    itemsize = _itemsize(delta, layout)
    spec = layout.block(delta.block)
    if delta.listed > spec.count:
        raise PeerError(f"publish.listed: {delta.listed} of {spec.count} elements")
    record = ring.copy(delta.at, record_end(delta, layout) - delta.at)
    listed_bytes = delta.listed * (_POSITION_BYTES + itemsize)
    payload = memoryview(record)[listed_bytes:] if listed_bytes else record
    coded = BlockDelta(delta.block, delta.coder, delta.new_hash, payload)
    if not delta.listed:
        return coded, None
    positions = np.frombuffer(record, np.uint32, delta.listed)
    if int(positions.max()) >= spec.count:
        raise PeerError(f"publish.positions: beyond {spec.count}")
    raw = record[delta.listed * _POSITION_BYTES : listed_bytes]
    bits = np.frombuffer(raw, spec.dtype.bits)
    old_hash = replica.hashes[delta.block].tobytes()
    return coded, StagedBlock(delta.block, positions, bits, old_hash, delta.new_hash)


def _itemsize(delta: SharedDelta, layout: Layout) -> int:
    if delta.block >= layout.n_blocks:
        raise PeerError(f"publish.block: {delta.block} of {layout.n_blocks}")
    return layout.block(delta.block).dtype.itemsize
