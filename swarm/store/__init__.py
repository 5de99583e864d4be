"""The files of a swarm on disk: records, seals, chunks, hash lists, model files and checkpoints.

- `home`: `Store`, the folder of one swarm, and recovery of the newest version that it can prove
- `records`: The core's records and the seals of versions, in SQLite
- `chunks`, `pack`: Chunks and pieces in memory, and in one file per version attempt
- `checkpoints`: Checkpoints of the replica, from which a restart replays the versions since; copies, or references to
  the user's folder
- `partial`: The checkpoint that an unfinished catch-up writes
- `clean`: The record of a clean exit
- `disk`, `private`: Durable writes, and file modes
"""

from swarm.store.checkpoints import Reference, SavedCheckpoint, SavedCheckpoints
from swarm.store.chunks import ChunkStore, StoredChunk
from swarm.store.disk import Disk, DiskFull
from swarm.store.home import Recovery, Store, drop_bits, kept_checkpoint, records_of
from swarm.store.records import Records, Seal, TwoSeals

__all__ = [
    "ChunkStore",
    "Disk",
    "DiskFull",
    "Records",
    "Recovery",
    "Reference",
    "SavedCheckpoint",
    "SavedCheckpoints",
    "Seal",
    "Store",
    "StoredChunk",
    "TwoSeals",
    "drop_bits",
    "kept_checkpoint",
    "records_of",
]
