"""One rank's attached connection to the seed: the seed's replica, and the hash of each of its blocks."""

import contextlib
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from codec import Layout, Replica
from codec.chunk import MAX_BODY_BYTES
from codec.shared import map_readonly
from node.ipc.channel import Channel, close_fds
from node.ipc.ring import RingWriter
from node.trainers.connection.seedlink import dial, expect, speaking
from node.trainers.messages import PROTOCOL, Attach, Attached, PublishSealed

__all__ = ["Link", "RankInfo"]

RING_BYTES: Final = 2 * MAX_BODY_BYTES
"""Two of the largest raw blocks, so that there is always room for one once the seed has read the others."""


class RankInfo:
    """Which rank of which trainer this process is. `session` (16 bytes) is the same on all ranks of a trainer."""

    def __init__(self, home: Path, session: bytes, rank: int = 0, world: int = 1, adapter: str = "") -> None:
        """`home`: the seed's SWARM_HOME. `world`: the number of ranks. `adapter`: the name of the adapter that the
        trainer publishes; empty: it publishes the base."""
        self.home, self.session, self.rank, self.world, self.adapter = home, session, rank, world, adapter

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which begins versions; the other ranks follow it."""
        return self.rank == 0


class Link:
    """A connection on which this rank has attached as a publisher of one part, and what the seed's replica holds.

    `replica`: the part, mapped read-only; pages that this process does not read cost it nothing. `hashes`: uint8
    (n_blocks of the part, 32), its block hashes in version `version` of epoch `epoch`: the head when this rank
    attached, and later the version that it published last. `root`: of the part in that version.
    `swarm_root`: the version's. `ring`: for this rank's blocks; None on systems without memfds. `base`: for an adapter,
    the layout of the base; else None. `base_sample`: of its weights, by `codec.base_sample`; else empty. `unheard`: the
    seal of the version that the constructor named; None without one.
    """

    def __init__(self, rank_info: RankInfo, unheard: tuple[int, int] | None = None) -> None:
        """Dial the seed and attach. `unheard`: (epoch, version) that was sent over an earlier connection, and of whose
        end nothing was heard. Raises `SwarmDown`, `SwarmTimeout`, `UsageError`."""
        with speaking("this trainer attached"):
            self.channel: Channel = dial(rank_info.home)
            with contextlib.ExitStack() as undo:
                undo.callback(self.channel.close)
                ring = RingWriter(RING_BYTES)
                undo.callback(ring.close)
                self.ring: RingWriter | None = None if ring.fd is None else ring
                attach = Attach(
                    PROTOCOL, rank_info.session, rank_info.rank, rank_info.world, adapter=rank_info.adapter,
                    unheard=unheard,
                )  # fmt: skip
                if ring.fd is None:
                    self.channel.send(attach)
                else:
                    self.channel.send(msgspec.structs.replace(attach, ring_bytes=ring.size), [ring.fd])
                attached, (replica_fd, hashes_fd) = expect(self.channel, Attached)
                undo.callback(close_fds, [replica_fd])
                try:
                    layout = Layout.from_bytes(attached.layout)
                    self.base = Layout.from_bytes(attached.base) if rank_info.adapter else None
                    table = np.frombuffer(map_readonly(hashes_fd), np.uint8)[: 32 * layout.n_blocks]
                    self.hashes: NDArray[np.uint8] = table.reshape(-1, 32).copy()
                finally:
                    close_fds([hashes_fd])
                # Takes ownership of the descriptor.
                self.replica = Replica.attach(replica_fd, layout, self.hashes, attached.offset)
                undo.pop_all()
        self.epoch, self.version = attached.epoch, attached.version
        self.root, self.swarm_root = attached.root, attached.swarm_root
        self.unheard = attached.unheard
        self.base_sample = attached.base_sample

    def close(self) -> None:
        """Disconnect, and release the ring. Safe to call twice."""
        self.channel.close()
        if self.ring is not None:
            self.ring.close()

    def note_sealed(self, epoch: int, version: int, sealed: PublishSealed, hashes: NDArray[np.uint8]) -> None:
        """The seed has sealed this version, so the replica now holds it. `hashes`: as the attribute, and copied."""
        self.hashes[:] = hashes
        self.epoch, self.version = epoch, version
        self.root, self.swarm_root = sealed.root, sealed.swarm_root
