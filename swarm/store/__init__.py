"""What a swarm keeps on disk: chunks, seals, hash lists, model files, anchors."""

from swarm.store.anchors import Anchor, Anchors
from swarm.store.chunks import ChunkStore, StoredChunk
from swarm.store.disk import Disk, DiskFull
from swarm.store.home import Recovery, Store, drop_bits, kept_checkpoint, records_of
from swarm.store.records import Records, Seal, TwoSeals

__all__ = [
    "Anchor",
    "Anchors",
    "ChunkStore",
    "Disk",
    "DiskFull",
    "Records",
    "Recovery",
    "Seal",
    "Store",
    "StoredChunk",
    "TwoSeals",
    "drop_bits",
    "kept_checkpoint",
    "records_of",
]
