"""A member's core with an honest authority and honest neighbours, and with a hostile parent, child and neighbour.

Hostile peers must not be able to end the session of an honest peer, to take the member's lease, or to keep it from
versions that honest peers have. In `PeerAuthority` the authority itself is hostile and signs anything; then the core
may raise only `PeerError`, and no table may grow without bound.
"""

import random
from typing import Annotated, Any, ClassVar, Final

import msgspec

from codec import ChunkKey
from scenarios.fuzz.cores import CoreWorld
from scenarios.fuzz.inputs.fields import Kind, fields_of, plain
from scenarios.fuzz.inputs.messages import MESSAGES, document_kinds, message_kinds
from scenarios.fuzz.inputs.scene import AUTHORITY, LAYOUT, Scene, key_of, manifest_of, root_of
from scenarios.fuzz.target import Broken, Target, World
from swarm.protocol.core import wire
from swarm.protocol.core.documents import Grant, Heartbeat, Report, bit_set, seal
from swarm.protocol.core.events import (
    Dial,
    Effect,
    Event,
    HeaderStored,
    Heard,
    JobDone,
    JobKind,
    Opened,
    PartsDone,
    PeerUp,
    PieceStored,
    Run,
    Stray,
    VersionId,
)
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import HeartbeatNews, Hello, ManifestNews, Pong, RosterNews, RosterStep, Welcome
from swarm.protocol.member import Peer
from swarm.protocol.membership.lease import Standing
from swarm.protocol.membership.roster import Change, Member, Roster, difference, seal_change, whole
from swarm.protocol.startup import SavedReplica

__all__ = ["PeerAuthority", "PeerTarget"]

SWARM: Final = AUTHORITY.public
NAMES: Final = ("us", "honest parent", "honest child", "hostile parent", "hostile child", "hostile neighbour")
KEYS: Final = [key_of(f"peer: {name}") for name in NAMES]
SLOT: Final = {key.public: slot for slot, key in enumerate(KEYS)}
HOSTILE: Final = range(3, 6)
PARENTS: Final = (
    (1, -1, 0, 1, 1, 1),  # our parent is the honest parent, the honest child is our child
    (3, 3, 3, -1, 0, 3),  # our parent is the hostile parent, the hostile child is our child
    (-1, 0, 0, 0, 0, 0),  # our parent is the authority, all others are our children
    (3, -1, 1, 1, 1, 1),
)
"""By stripe, the parents of slots 0 to 5; -1 is the authority."""
STEPS_A_VERSION: Final = 250
"""Cases (of 20 ms each) between two versions."""
PIECES: Final = (1000, 1000, 500)
MOST_BEHIND: Final = 3
"""Versions that the member may lack, given a parent that sends nothing."""


class Bulk(msgspec.Struct, frozen=True, array_like=True, tag="bulk"):
    """An event that a hostile neighbour's bulk stream can make the runtime report: valid headers and pieces, in a
    stripe and at a time of its choice. `what`: 0 header, 1 piece, 2 stray."""

    what: Annotated[int, msgspec.Meta(ge=0, le=2)]
    stripe: Annotated[int, msgspec.Meta(ge=0, le=255)]
    behind: Annotated[int, msgspec.Meta(ge=0, le=20)]
    seq: Annotated[int, msgspec.Meta(ge=0, le=4)]
    index: Annotated[int, msgspec.Meta(ge=0, le=2)]
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


_bulk = msgspec.msgpack.Decoder(Bulk)


def _chunk_id(version: int, seq: int) -> bytes:
    return bytes([seq + 1]) * 24 + version.to_bytes(8, "little")


def _header(peer: bytes | None, stripe: int | None, version: int, seq: int) -> HeaderStored:
    key = ChunkKey(0, version, 0, seq)
    return HeaderStored(peer, stripe, key, _chunk_id(version, seq), root_of(0, version - 1), PIECES, 100)


class _World(CoreWorld):
    def __init__(self, rng: random.Random, *, hostile_authority: bool = False) -> None:
        super().__init__()
        self.hostile_authority = hostile_authority
        self.version, self.cases, self.beats, self.changes = 3, 0, 0, 1
        members = tuple(self._member(slot, 100.0) for slot in range(len(KEYS)))
        self.plan_now = Roster(SWARM, 1, 1, ("/ip4/198.51.100.9/tcp/4001",), members, PARENTS)
        self.step = seal_change(difference(None, self.plan_now), AUTHORITY)
        self.core = Peer(
            KEYS[0], SWARM, ("/ip4/198.51.100.9/tcp/4001",), self._join(), Tuning.loopback(),
            random.Random(rng.random()), SavedReplica(self._manifest(3), LAYOUT.hash),
        )  # fmt: skip
        self.honest = set() if hostile_authority else {SWARM, KEYS[1].public, KEYS[2].public}
        self.me = KEYS[3]
        self.core.start(0.0)
        self._beat_at = 0.0
        self._welcome()
        for key in KEYS[1:]:
            self._meet(key.public)
        for _ in range(10):
            self.turn(rng)

    # ------------------------------------------------------------ signed documents

    def _member(self, slot: int, up_mbit: float) -> Member:
        address = f"/ip4/198.51.100.{slot + 1}/tcp/4001"
        return Member(slot, KEYS[slot].public, (address,), True, NAMES[slot], "eu", up_mbit, False)

    def _join(self) -> wire.Join:
        return wire.Join(b"", ("/ip4/198.51.100.1/tcp/4001",), "us", "eu", 100.0, 100.0, False)

    def _manifest(self, version: int) -> bytes:
        ids = tuple(_chunk_id(version, seq) for seq in range(len(PARENTS)))
        return manifest_of(version, ids).seal(AUTHORITY)

    def _grant(self, slot: int) -> bytes:
        return seal(Grant(SWARM, KEYS[slot].public, slot, 1, 1000.0, bytes(16)), AUTHORITY)

    def _heartbeat(self) -> bytes:
        self.beats += 1
        live = bit_set(range(len(KEYS)))
        return seal(
            Heartbeat(SWARM, 1, self.beats, 1000.0 + self.now, self.plan_now.serial, 0, self.version, live, live),
            AUTHORITY,
        )

    # ------------------------------------------------------------ honest peers

    def _welcome(self) -> None:
        self.connect(SWARM)
        beat = self._heartbeat()
        roster = whole(self.plan_now, self.step)
        self.hear(SWARM, Welcome(self._grant(0), roster, beat, self._manifest(self.version)))

    def _meet(self, peer: bytes) -> None:
        """Connect and greet."""
        self.connect(peer)
        if peer == SWARM:
            if self.core.state.grant is None:
                self._welcome()
            else:
                self.hear(SWARM, Hello(b"", 0, 0, 0, 0))
        elif peer in SLOT:
            self.hear(peer, Hello(self._grant(SLOT[peer]), 0, 0, 0, self.version))

    def sent(self, peer: bytes, message: wire.Message) -> None:
        super().sent(peer, message)
        if peer not in self.honest or peer not in self.up:
            return
        answers: list[Event] = []
        match message:
            case wire.Ping(nonce):
                answers = [Heard(peer, Pong(nonce))]
            case wire.WantChunk(_, version, 0, seq) if 3 < version <= self.version and seq < len(PARENTS):
                header = _header(peer, None, version, seq)
                answers = [header, *(PieceStored(peer, None, header.key, i, n) for i, n in enumerate(PIECES))]
            case wire.WantChunk(epoch, version, attempt, seq):
                answers = [Heard(peer, wire.LacksChunk(epoch, version, attempt, seq))]
            case wire.WantManifest(0, version) if 3 <= version <= self.version:
                answers = [Heard(peer, ManifestNews(self._manifest(version)))]
            case wire.WantRoster():
                answers = [Heard(peer, RosterNews(whole(self.plan_now, self.step)))]
            case wire.WantBlob(request) | wire.WantBlock(request):
                answers = [PartsDone(peer, request, VersionId(0, self.version), size_bytes=1000)]
        for answer in answers:
            self.queue(answer)

    def other(self, effect: Effect) -> None:
        if isinstance(effect, Run):
            job = effect.job
            result = Opened(root_of(0, job.version.version), False) if job.kind == JobKind.OPEN else None
            self.queue(JobDone(job, True, result))

    def _answer(self, effects: Any) -> None:
        dials = [e for e in effects if isinstance(e, Dial) and (e.peer in SLOT or e.peer == SWARM)]
        super()._answer([e for e in effects if e not in dials])
        for dial in dials:
            if dial.peer not in self.up:
                self.up.add(dial.peer)
                self.queue(PeerUp(dial.peer, True, "/ip4/198.51.100.7/tcp/1"))
                grant = self._grant(SLOT[dial.peer]) if dial.peer in SLOT else b""
                self.queue(Heard(dial.peer, Hello(grant, 0, 0, 0, self.version)))

    def _next_version(self) -> None:
        """Let the authority seal a version. Honest parents send their stripes, the others send nothing."""
        self.version += 1
        for seq, parents in enumerate(PARENTS):
            peer = SWARM if parents[0] < 0 else KEYS[parents[0]].public
            if peer in self.honest and peer in self.up:
                header = _header(peer, seq, self.version, seq)
                self.apply(header)
                for index, size in enumerate(PIECES):
                    self.apply(PieceStored(peer, seq, header.key, index, size))
        self.hear(SWARM, ManifestNews(self._manifest(self.version)))

    def _next_plan(self) -> None:
        """Publish a new roster, in which one member's uplink has changed."""
        self.changes += 1
        members = list(self.plan_now.members)
        members[5] = self._member(5, 100.0 + self.changes)
        after = msgspec.structs.replace(self.plan_now, serial=self.changes, members=tuple(members))
        self.step = seal_change(difference(self.plan_now, after), AUTHORITY)
        self.plan_now = after
        self.hear(SWARM, RosterStep(self.step))

    # ------------------------------------------------------------ a case

    def turn(self, rng: random.Random) -> None:
        self.cases += 1
        self.pass_time(rng)
        if not self.hostile_authority:
            if self.now >= self._beat_at:
                self._beat_at = self.now + 0.5
                for peer in sorted(self.honest - self.up):
                    self._meet(peer)
                beat = HeartbeatNews(self._heartbeat())
                for peer in sorted(self.honest):
                    self.hear(peer, beat)
            if self.cases % STEPS_A_VERSION == 0:
                self._next_version()
            if self.cases % 777 == 0:
                self._next_plan()
        self._choose(rng)

    def _choose(self, rng: random.Random) -> None:
        if self.hostile_authority and rng.randrange(4):
            self.me, self.slot = AUTHORITY, 0
        else:
            slot = rng.choice(HOSTILE)
            self.me, self.slot = KEYS[slot], slot
        peer = self.me.public
        if rng.randrange(200) == 0:
            self.drop(peer)
        if peer not in self.up or not self.core.admits(peer):
            self.drop(peer)
            self._meet(peer)
        self.stripe = rng.randrange(len(PARENTS))
        self.other_slot = rng.randrange(len(KEYS))
        self.serial = 1
        self.beat = self.core.state.leases.sealed
        self.beat_serial = self.beats
        self.time = 1000.0 + self.now
        self.roster = self.core.state.roster
        self.count = self._count

    def _count(self) -> int:
        return self.cases

    def grant(self) -> Grant:
        """Return the member's own grant when the authority sends, and the sender's otherwise."""
        holder = KEYS[0] if self.me is AUTHORITY else self.me
        return Grant(SWARM, holder.public, self.slot, 1, 1000.0, bytes(16))

    def manifest(self) -> Any:
        return manifest_of(self.version + 1, tuple(_chunk_id(self.version + 1, seq) for seq in range(2)))

    def heartbeat(self) -> Heartbeat:
        self.beats += 1
        return super().heartbeat()

    def sealed_heartbeat(self) -> bytes:
        return Scene.sealed_heartbeat(self) if self.hostile_authority else super().sealed_heartbeat()

    def sealed_roster(self) -> bytes:
        return Scene.sealed_roster(self) if self.hostile_authority else super().sealed_roster()

    def sealed_change(self) -> bytes:
        return Scene.sealed_change(self) if self.hostile_authority else super().sealed_change()

    def sealed_manifest(self) -> bytes:
        return Scene.sealed_manifest(self) if self.hostile_authority else super().sealed_manifest()

    def give(self, kind: Kind, data: bytes) -> str:
        return self._bulk(data) if kind.name == "bulk" else super().give(kind, data)

    def _bulk(self, data: bytes) -> str:
        try:
            event = _bulk.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "not decoded"
        peer = self.me.public
        if peer not in self.up:
            return "no session"
        stripe = None if event.stripe == 255 else event.stripe
        version = max(4, self.version + 1 - event.behind)
        if event.what == 2:
            self.apply(Stray(peer, stripe, event.size), peer)
            return "a stray"
        header = _header(peer, stripe, version, event.seq)
        self.apply(header, peer)
        if event.what == 1:
            self.apply(PieceStored(peer, stripe, header.key, event.index, PIECES[event.index]), peer)
        return "a header" if event.what == 0 else "a piece"

    def check(self) -> None:
        if self.hostile_authority:
            return
        core = self.core
        if core.standing(self.now) is not Standing.FRESH:
            raise Broken(f"our lease is {core.standing(self.now)}")
        for peer in self.honest:
            if not core.admits(peer):
                raise Broken(f"no session with an honest peer, {SLOT.get(peer, 'the authority')}")
        held = core.state.held
        if held is None or held.version < self.version - MOST_BEHIND:
            raise Broken(f"the member holds {held}, honest peers hold {self.version}")


def bulk_kind() -> Kind:
    """Return the kind of the bulk lane's events."""
    sample = Bulk(1, 1, 0, 0, 0, 1000)
    return Kind(
        "bulk",
        fields_of(Bulk, plain(sample)),
        lambda world: plain(Bulk(1, world.stripe, 0, world.stripe, 0, 1000)),
        lambda world, body: body,
    )


class PeerTarget(Target):
    """A member's core among hostile neighbours."""

    name: ClassVar[str] = "peer"
    about: ClassVar[str] = "a member's core, with a hostile parent, child and neighbour"
    episode: ClassVar[int] = 4000

    def __init__(self) -> None:
        theirs = [kind for kind in document_kinds() if not kind.by_authority]
        self.kinds = [*message_kinds(), *theirs, bulk_kind()]

    def world(self, rng: random.Random) -> World:
        return _World(rng)

    def types(self) -> dict[str, Any]:
        return {cls.__name__: cls for cls in MESSAGES} | {"Reports/Report": Report, "bulk": Bulk}


class PeerAuthority(PeerTarget):
    """A member's core with a hostile authority."""

    name: ClassVar[str] = "peer-authority"
    about: ClassVar[str] = "a member's core, with an authority that signs anything"
    episode: ClassVar[int] = 2000

    def __init__(self) -> None:
        super().__init__()
        self.kinds = [*message_kinds(), *document_kinds(), bulk_kind()]

    def world(self, rng: random.Random) -> World:
        return _World(rng, hostile_authority=True)

    def types(self) -> dict[str, Any]:
        found = {"HeartbeatNews/Heartbeat": Heartbeat, "RosterStep/Change": Change, "RosterNews/Roster": Roster}
        return super().types() | found | {"Welcome/Grant": Grant}
