"""Progress of a version from its first piece to the replica: verified early, written late.

A STAGE job decodes each chunk into scratch memory as soon as it is complete, if its parent root is the replica's. When
the manifest and all its chunks are here, one APPLY job compares the roots, makes the seal durable and writes the bits.
Versions are applied strictly in the order in which each names its parent.
"""

from collections.abc import Callable
from dataclasses import replace

from codec import Manifest, open_manifest
from swarm.protocol.core.events import Announce, HeaderStored, Job, JobDone, JobKind, PieceStored, Run, VersionApplied
from swarm.protocol.core.notices import Equivocation, ReplicaDamaged, VersionComplete
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import ManifestNews, WantManifest
from swarm.protocol.state import State
from swarm.protocol.transfer.chunks import Chunk, Version
from swarm.protocol.transfer.exchange import HEADER
from swarm.protocol.transfer.repair.repair import Repair

__all__ = ["Progress"]


class Progress:
    """Takes headers, pieces and manifests; stages and applies versions."""

    def __init__(
        self,
        state: State,
        repair: Repair,
        *,
        relay_only: bool,
        on_damage: Callable[[float], None],
    ) -> None:
        """`on_damage(now)`: called when a job finds that the replica is damaged."""
        self._state = state
        self._repair = repair
        self._relay_only = relay_only
        self._on_damage = on_damage
        self._running: set[Job] = set()
        self._asked: dict[VersionId, float] = {}
        """Manifests requested, and the local time from which each may be requested again."""
        self._since: dict[VersionId, float] = {}
        """The local time since when each of these manifests has been missing."""
        self.stopped = False
        """The authority's key has sealed two different roots for one version: no manifest is accepted any more."""

    # ------------------------------------------------------------ what arrives

    def header(self, event: HeaderStored, now: float) -> None:
        state = self._state
        state.exchange.parents.arrived(event.peer, event.stripe, event.header_bytes, now)
        if VersionId(event.key.epoch, event.key.version) <= state.floor:
            return
        if not self._believes_stripe(event):
            event = replace(event, stripe=None)
        known = state.chunks.find(event.key)
        unplaced = known is not None and known.stripe is None
        taken = state.chunks.header(event, now)
        if taken is None:
            return
        chunk, news = taken
        if news:
            state.exchange.parents.moved(chunk.stripe, now)
        if news or (unplaced and chunk.stripe is not None):
            state.exchange.push(chunk, HEADER, event.peer, now)
            if chunk.wanted:
                self._repair.header_arrived(chunk, now)
        if state.shard is not None and event.peer is not None:
            self._choose(chunk, event.peer, news=news)
        if news and not chunk.wanted:  # no piece will come that would ask whether the version can go on
            self.advance(now)
        for index in chunk.held() if unplaced and chunk.stripe is not None else ():
            state.exchange.push(chunk, index, event.peer, now)

    def _choose(self, chunk: Chunk, peer: bytes, *, news: bool) -> None:
        """We hold a shard, and `peer` sent a header: ask it for the pieces if we need them and nobody else is asked."""
        parent = None if chunk.stripe is None else self._state.exchange.parents.parent(chunk.stripe)
        again = peer == parent and not chunk.have and not self._repair.fetches(chunk.key)
        if not chunk.done and (news or again):
            self._state.outbox.send(peer, chunk.want())

    def _believes_stripe(self, event: HeaderStored) -> bool:
        """Whether to believe the stripe that a frame names, since frames are not signed.

        It is believed from our parent in that stripe, from a peer that we asked for the chunk, and from our own disk.
        """
        if event.stripe is None or event.peer is None:
            return True
        roster = self._state.roster
        if roster is None or event.stripe >= roster.stripes:
            return False
        is_parent = self._state.exchange.parents.parent(event.stripe) == event.peer
        return is_parent or self._repair.has_asked(event.peer, event.key)

    def piece(self, event: PieceStored, now: float) -> None:
        state = self._state
        state.exchange.parents.arrived(event.peer, event.stripe, event.size_bytes, now)
        taken = state.chunks.piece(event.key, event.index, now)
        if taken is None or not taken[1]:
            return
        taken[0].source = event.peer
        state.exchange.parents.moved(taken[0].stripe, now)
        state.exchange.push(taken[0], event.index, event.peer, now)
        self._repair.piece_arrived(taken[0], event.peer, now)
        if taken[0].whole:
            self.advance(now)

    def manifest(self, sealed: bytes, now: float, *, source: bytes | None) -> None:
        """Take a manifest from a peer, or from gossip (`source` None); forward it to all children if it is new."""
        state = self._state
        if self.stopped or sealed == state.sealed_manifest:
            return
        if any(version.sealed_manifest == sealed for version in state.chunks.versions.values()):
            return
        manifest = open_manifest(sealed, state.swarm)
        id_ = VersionId(manifest.epoch, manifest.version)
        self._asked.pop(id_, None)
        self._since.pop(id_, None)
        known = self._known_root(id_)
        if known is not None and known != manifest.root:
            self.stopped = True
            state.outbox.notify(Equivocation(id_, known, manifest.root))
            return
        if id_ <= state.floor:
            return
        if state.chunks.manifest(manifest, sealed, now) is None:
            return
        for child in state.children():
            if child != source:
                state.outbox.send(child, ManifestNews(sealed))
        if source is not None:
            state.outbox.emit(Announce(sealed))
        self.advance(now)

    # ------------------------------------------------------------ what follows

    def advance(self, now: float) -> None:
        """Start the jobs that are possible now for the version that follows ours."""
        state = self._state
        if state.held is None or state.manifest is None or self.stopped:
            return
        version = self._next()
        if version is None:
            return
        if version.complete and not version.told:
            version.told = True
            state.outbox.notify(VersionComplete(version.id))
        if self._relay_only:
            if version.complete:
                self._hold(version, now)
            return
        for _, chunk in sorted(version.unstaged.items()):
            self._run(Job(JobKind.STAGE, version.id, chunk.key, generation=version.generation))
        if version.complete and not version.unstaged:
            self._run(Job(JobKind.APPLY, version.id, generation=version.generation))

    def done(self, event: JobDone, now: float) -> None:
        """A STAGE or APPLY has ended."""
        self._running.discard(event.job)
        version = self._state.chunks.version(event.job.version)
        if version is None or version.generation != event.job.generation:
            return
        if not event.ok:
            self._state.outbox.notify(ReplicaDamaged(event.job.version, str(event.result)))
            self._on_damage(now)
        elif event.job.kind == JobKind.APPLY:
            self._hold(version, now)
        else:
            chunk = self._state.chunks.find(event.job.key) if event.job.key is not None else None
            if chunk is not None:
                version.staged(chunk)
            self.advance(now)

    def fill_gaps(self, now: float, ask: list[bytes]) -> None:
        """Request missing manifests when a later version is known, but not the next one. `ask`: peers to ask.

        The heartbeat names the newest version. A manifest that was forwarded between our hello and our attaching does
        not reach us otherwise.
        """
        state = self._state
        if self._asked:
            self._asked = {v: at for v, at in self._asked.items() if v > state.floor}
            self._since = {v: at for v, at in self._since.items() if v > state.floor}
        heartbeat = state.leases.heartbeat
        known = [v.id for v in state.chunks.versions.values() if v.manifest is not None and v.id > state.floor]
        if heartbeat is not None and state.held is not None and heartbeat.head > state.floor:
            known.append(heartbeat.head)
        if not known or not ask or self._can_follow(max(known)):
            return
        last = max(known)
        first = state.floor.version + 1 if last.epoch == state.floor.epoch else last.version
        for number in range(max(first, last.version - state.tuning.retain_versions), last.version + 1):
            id_ = VersionId(last.epoch, number)
            version = state.chunks.version(id_)
            if (version is None or version.manifest is None) and now >= self._asked.get(id_, 0.0):
                tries = self._asked.get(id_)
                self._asked[id_] = now + state.tuning.pull_deadline_s
                self._since.setdefault(id_, now)
                source = ask[(number + (0 if tries is None else int(now / state.tuning.pull_deadline_s))) % len(ask)]
                state.outbox.send(source, WantManifest(id_.epoch, id_.version))

    def behind(self, now: float) -> Manifest | None:
        """The manifest to catch up to if the versions up to it cannot be replayed; None if they can.

        They cannot if they are too many, of another epoch, or if the next manifest stays missing.
        """
        state = self._state
        known = [v.manifest for v in state.chunks.versions.values() if v.manifest is not None and v.id > state.floor]
        if not known:
            return None
        last = max(known, key=lambda m: (m.epoch, m.version))
        if self._can_follow(VersionId(last.epoch, last.version)):
            return None
        far = last.epoch != state.floor.epoch or last.version - state.floor.version > state.tuning.retain_versions
        first = VersionId(state.floor.epoch, state.floor.version + 1)
        version = state.chunks.version(first)
        lacks_seal = version is None or version.manifest is None
        stuck = lacks_seal and now - self._since.get(first, now) > 3 * state.tuning.pull_deadline_s
        return last if far or stuck else None

    def _known_root(self, id_: VersionId) -> bytes | None:
        """The root of this version in a manifest that we have accepted; None if there is none."""
        state = self._state
        if state.manifest is not None and (state.manifest.epoch, state.manifest.version) == id_:
            return state.manifest.root
        version = state.chunks.version(id_)
        if version is not None and version.manifest is not None:
            return version.manifest.root
        return open_manifest(state.manifests[id_], state.swarm).root if id_ in state.manifests else None

    def _next(self) -> Version | None:
        """The version that follows ours. A sealed one goes first: an attempt of which chunks came may never be sealed,
        as when the trainer died on its way back to an older version. Of several the newest."""
        state = self._state
        root = state.manifest.root if state.manifest is not None else b""
        after = [v for v in state.chunks.versions.values() if v.parent_root == root and v.id > state.floor]
        return max(after, key=lambda v: (v.manifest is not None, v.id)) if after else None

    def _can_follow(self, newest: VersionId) -> bool:
        """Whether the manifest of the version that follows ours is here, and so are its chunks, or others still keep
        them while `newest` is the newest version.

        Chunks alone may be left from before a restart, and do not show that the version was sealed. A member that was
        cut off in the middle of a version, and comes back when nobody keeps that version, waits for it in vain.
        """
        following = self._next()
        if following is None or following.manifest is None:
            return False
        kept = newest.version - following.id.version < self._state.tuning.retain_versions
        return following.complete or (following.id.epoch == newest.epoch and kept)

    def _run(self, job: Job) -> None:
        if job not in self._running:
            self._running.add(job)
            self._state.outbox.emit(Run(job))

    def _hold(self, version: Version, now: float) -> None:
        state = self._state
        assert version.manifest is not None
        state.set_held(version.id, version.manifest, version.sealed_manifest)
        self._repair.forget(state.floor)
        state.outbox.emit(VersionApplied(version.id, version.manifest))
        self.advance(now)
