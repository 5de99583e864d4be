"""The authority's core among honest members, hostile members and strangers.

Hostile peers send anything that they can sign. Honest members must keep their leases, slots and sessions, and the core
must not raise.
"""

import random
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Final

from codec import ChunkKey
from codec.sign import Key
from scenarios.fuzz.cores import CoreWorld
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.messages import MESSAGES, document_kinds, message_kinds
from scenarios.fuzz.inputs.scene import AUTHORITY, key_of, manifest_of, root_of
from scenarios.fuzz.target import Broken, Target, World
from swarm.protocol.authority import Authority
from swarm.protocol.core import wire
from swarm.protocol.core.documents import AuthorityTime, Capability, Grant, Report, open_grant, seal
from swarm.protocol.core.events import Gave, HeaderStored, LocalChunk, LocalSeal
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Attach, Hello, Join, Reports, Welcome
from swarm.protocol.membership.lease import Standing
from swarm.protocol.membership.roster import AUTHORITY as SEED
from swarm.protocol.startup import Boot, Saved, Site

__all__ = ["AuthorityTarget"]

HONEST: Final = 4
HOSTILE: Final = 3
STRANGERS: Final = 2
SEAL_EVERY: Final = 400
"""Cases between two sealed versions."""
_CARRIED: Final = ("Reports/Report", "Reports/many", "Reports/flood", "Bye/Report", "Hello/Grant", "Join/Capability")


@dataclass
class _Actor:
    """One peer: its key, ticket and grant, and how many reports it has signed."""

    key: Key
    ticket: bytes
    quota: int = 0
    grant: Grant | None = None
    sealed: bytes = b""
    reports: int = 0
    attached: int = -1


class _World(CoreWorld):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.version = 0
        self.cases = 0
        self._tickets = count(1)
        self.core = Authority(
            AUTHORITY, Tuning.loopback(), random.Random(rng.random()),
            Boot(1, clock=lambda now: AuthorityTime(1000.0 + now)), Saved(manifest_of(0).seal(AUTHORITY)),
            Site(("/ip4/198.51.100.9/tcp/4001",)),
        )  # fmt: skip
        self._answer(self.core.start(0.0))
        self.actors = {key.public: self._actor(key) for key in map(key_of, self._names())}
        keys = list(self.actors)
        self.honest = set(keys[:HONEST])
        self.members = keys[: HONEST + HOSTILE]
        self._hostile = keys[HONEST:]
        self._beat = b""
        for key in self.members:
            self._enter(self.actors[key])
        for _ in range(20):
            self.pass_time(rng)
        self.slots = {key: self.core.book.slot_of[key] for key in self.honest}
        self.me = self.actors[self._hostile[0]].key

    def _names(self) -> list[str]:
        return [f"honest {i}" for i in range(HONEST)] + [f"hostile {i}" for i in range(HOSTILE + STRANGERS)]

    def _actor(self, key: Key) -> _Actor:
        number = next(self._tickets)
        return _Actor(key, number.to_bytes(16, "little"), quota=(0, 1 << 40)[number % 2])

    # ------------------------------------------------------------ actions of all peers

    def _capability(self, actor: _Actor) -> Capability:
        return Capability(self.swarm, actor.ticket, 1e9, 8, actor.quota)

    def _join(self, actor: _Actor) -> Join:
        sealed = seal(self._capability(actor), AUTHORITY)
        return Join(sealed, ("/ip4/198.51.100.7/tcp/4001",), "n", "eu", 100.0, 100.0, False)

    def _enter(self, actor: _Actor) -> None:
        """Connect, then show the grant or ask for one."""
        peer = actor.key.public
        if self.refused.pop(peer, "") == "ticket":  # used up or revoked: the trainer issues another
            actor.ticket = next(self._tickets).to_bytes(16, "little")
            actor.grant = None
        self.connect(peer)
        if self.core.admits(peer):
            return
        if actor.grant is not None and self.core.book.slot_of.get(peer) == actor.grant.slot:
            self.hear(peer, Hello(actor.sealed, 0, 0, 0, 0))
        else:
            self.hear(peer, self._join(actor))

    def sent(self, peer: bytes, message: wire.Message) -> None:
        super().sent(peer, message)
        if isinstance(message, Welcome):
            actor = self.actors[peer]
            actor.sealed, actor.grant = message.grant, open_grant(message.grant, self.swarm)

    def _report(self, actor: _Actor) -> Report:
        assert actor.grant is not None
        actor.reports += 1
        self.me, self.slot, self.serial = actor.key, actor.grant.slot, actor.grant.serial
        return Report(
            self.swarm, actor.key.public, actor.grant.slot, actor.grant.serial, actor.reports,
            self.core.state.leases.hash, 0, self.version, 0, 0, "", 0, 0, 0.0, False, 1.0,
        )  # fmt: skip

    def _answer_beat(self) -> None:
        """Answer a new heartbeat: every member renews its lease and attaches to its planned parents."""
        self._beat = self.core.state.leases.sealed
        for peer in self.members:
            actor = self.actors[peer]
            if peer not in self.up or not self.core.admits(peer):
                self._enter(actor)
            if actor.grant is not None and self.core.admits(peer):
                self.hear(peer, Reports(0, (seal(self._report(actor), actor.key),)))
                self._attach(peer, actor)

    def _attach(self, peer: bytes, actor: _Actor) -> None:
        roster = self.core.state.roster
        if roster is None or actor.attached == roster.stamp or actor.grant is None:
            return
        actor.attached = roster.stamp
        for stripe in range(roster.stripes):
            if roster.parent(stripe, actor.grant.slot) == SEED:
                self.hear(peer, Attach(stripe, 0, self.version, 1 << 40, ()))

    def gave(self, peer: bytes) -> None:
        self.queue(Gave(peer, 1000))

    def _seal(self) -> None:
        """Seal a version of two chunks."""
        number = self.version + 1
        for seq in range(2):
            key = ChunkKey(0, number, 0, seq)
            parent = root_of(0, number - 1)
            self.apply(LocalChunk(HeaderStored(None, None, key, bytes([seq]) * 32, parent, (1000,) * 4, 100)))
        manifest = manifest_of(number, tuple(bytes([seq]) * 32 for seq in range(2)))
        self.version = number
        self.apply(LocalSeal(manifest.seal(AUTHORITY)))

    # ------------------------------------------------------------ a case

    def turn(self, rng: random.Random) -> None:
        self.cases += 1
        self.pass_time(rng)
        if self.core.state.leases.sealed != self._beat:
            self._answer_beat()
        if self.cases % SEAL_EVERY == 0:
            self._seal()
        actor = self.actors[rng.choice(self._hostile)]
        peer = actor.key.public
        if rng.randrange(100) == 0:
            self.drop(peer)
        if peer in self.members or rng.randrange(4):
            if peer not in self.up or (peer in self.members and not self.core.admits(peer)):
                self._enter(actor) if peer in self.members else self.connect(peer)
        else:
            self.connect(peer)
        self._speak_as(actor, rng)

    def _speak_as(self, actor: _Actor, rng: random.Random) -> None:
        self.me = actor.key
        if actor.grant is not None:
            self.slot, self.serial = actor.grant.slot, actor.grant.serial
        self.beat = self.core.state.leases.sealed
        self.roster = self.core.state.roster
        self.other_slot = rng.randrange(HONEST + HOSTILE)
        self.stripe = rng.randrange(8)
        self._actor_now = actor

        def following() -> int:
            actor.reports += 1
            return actor.reports

        self.count = following

    def grant(self) -> Grant:
        return self._actor_now.grant or super().grant()

    def capability(self) -> Capability:
        return self._capability(self._actor_now)

    def check(self) -> None:
        """Check that honest members keep slots, fresh leases and sessions."""
        core = self.core
        for peer, slot in self.slots.items():
            if core.book.slot_of.get(peer) != slot:
                raise Broken("an honest member lost its slot")
            if core.standing(slot, self.now) is not Standing.FRESH:
                raise Broken(f"the lease of an honest member is {core.standing(slot, self.now)}")
            session = core.state.sessions.get(peer)
            if session is None or not session.ready or session.closing:
                raise Broken("an honest member has no session")
        if core.superseded:
            raise Broken("the authority stopped")


class AuthorityTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "authority"
    about: ClassVar[str] = "the trainer's core, among honest members, hostile members and strangers"
    episode: ClassVar[int] = 4000

    def __init__(self) -> None:
        kinds: list[Kind] = [kind for kind in document_kinds() if kind.name in _CARRIED]
        self.kinds = [*message_kinds(), *kinds]

    def world(self, rng: random.Random) -> World:
        return _World(rng)

    def types(self) -> dict[str, Any]:
        return {cls.__name__: cls for cls in MESSAGES} | {"Reports/Report": Report}
