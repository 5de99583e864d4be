"""The repair of late data: what a member does about chunks that its trees bring late, its own and its neighbours'.

There are two ways to get such a chunk. By load shedding a member tells its neighbours which chunks are late, and takes
the first offer; its own offers are the other end of that. A pull is the last resort: it asks one peer after another for
a chunk whose stripe makes no progress.
"""

from functools import partial

from codec import ChunkKey
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import LacksChunk, LateChunkWants, Offer, WantChunk
from swarm.protocol.state import State
from swarm.protocol.transfer.chunks import Chunk, key_of
from swarm.protocol.transfer.repair.load_shedding import LoadShedding
from swarm.protocol.transfer.repair.offers import Offers
from swarm.protocol.transfer.repair.pulls import Pulls
from swarm.protocol.transfer.sources import chunk_sources, near_neighbours

__all__ = ["Repair"]


class Repair:
    """The late-data repair of one member."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._pulls = Pulls(state.tuning, state.outbox, header_first=state.shard is not None)
        self._load_shedding = LoadShedding(
            state.tuning,
            state.outbox,
            state.exchange.parents,
            neighbours=partial(near_neighbours, state),
            assigned=state.chunks.assigned,
        )
        self._offers = Offers(state)

    # ------------------------------------------------------------ chunks

    def header_arrived(self, chunk: Chunk, now: float) -> None:
        """A chunk's header arrived by a tree: the parent of its stripe owes the pieces."""
        self._load_shedding.owes(chunk, now)

    def piece_arrived(self, chunk: Chunk, peer: bytes | None, now: float) -> None:
        """A new piece of the chunk came from `peer` (None: from our own disk)."""
        self._pulls.arrived(chunk, now)
        self._load_shedding.arrived(chunk, peer, now)

    def has_asked(self, peer: bytes, key: ChunkKey) -> bool:
        """Whether we have asked `peer` for this chunk."""
        return self._pulls.asked_of(peer, key) or self._load_shedding.asked_of(peer, key)

    def fetches(self, key: ChunkKey) -> bool:
        """Whether this chunk is on its way from another peer than our parent."""
        return key in self._pulls or key in self._load_shedding

    def forget(self, floor: VersionId) -> None:
        """Versions up to `floor` are applied: their chunks are not late any more."""
        self._load_shedding.forget(floor)

    # ------------------------------------------------------------ messages

    def late_wants(self, peer: bytes, message: LateChunkWants, now: float) -> None:
        self._offers.heard(peer, message, now)

    def offered(self, peer: bytes, message: Offer, now: float) -> None:
        self._load_shedding.offered(peer, key_of(message), now)

    def lacks(self, peer: bytes, message: LacksChunk) -> None:
        self._pulls.lacks(peer, key_of(message))
        self._load_shedding.lacks(peer, key_of(message))

    def asked_for(self, peer: bytes, message: WantChunk, now: float) -> None:
        """`peer` pulls a chunk, or takes our offer. A late joiner's pull waits for the other children."""
        state = self._state
        taken = self._offers.taken(peer, key_of(message)) or state.exchange.is_choice(peer, key_of(message))
        if taken or state.exchange.has_time(now) or not state.late_joiners.has(peer):
            state.uploads.serve(peer, message, now)

    # ------------------------------------------------------------ peers and time

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone."""
        self.unanswered(peer)
        self._offers.lost(peer)
        self._state.uploads.lost(peer)

    def unanswered(self, peer: bytes) -> None:
        """`peer` does not answer pings: what it was asked for is asked of others."""
        self._pulls.lost(peer)
        self._load_shedding.lost(peer)

    def pulled_from(self) -> dict[bytes, float]:
        """The peers that are asked for a chunk by a pull now, and the local time of the latest request to each."""
        return self._pulls.asked()

    def tick(self, now: float) -> None:
        """Start the pulls that are due, and go to the next source where one did not answer."""
        state = self._state
        waiting = [v for _, v in sorted(state.chunks.versions.items()) if v.id > state.floor]
        parents = state.exchange.parents
        self._pulls.tick(
            waiting, parents.progress_at, partial(chunk_sources, state), now, self._load_shedding, parents.patient_s
        )

    def timer(self, now: float) -> None:
        """The timer "load-shedding" went off."""
        self._load_shedding.due(now)

    def use_spare_uplink(self, now: float) -> None:
        """Our uplink may have become free: offer chunks to neighbours that want some."""
        self._offers.look(now)
