"""The ledger service among honest nodes and hostile ones, with a real book (in memory).

A rollout may count only from the node that holds the lease of its sample. No honest node may be quarantined, or refused
for a reason that only a dishonest node gives. All are of one class and judge each other by replays.
"""

import random
from pathlib import Path
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from codec.sign import Key
from node.engines.base import ABILITIES, RewardAsked
from node.ledger import messages as work
from node.ledger.binding import Binding
from node.ledger.book import Book
from node.ledger.messages import Reason, Rollout, VersionSpan, WorkMessage
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.part_history import Change
from node.ledger.rules import Ledger
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.state import Head
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.scene import key_of, root_of
from scenarios.fuzz.inputs.work import MESSAGES, SAMPLES, SAMPLING, sample_rollout, work_kinds
from scenarios.fuzz.tables import sizes_of
from scenarios.fuzz.target import Broken, Target, World

__all__ = ["LedgerTarget"]

HONEST: Final = 4
HOSTILE: Final = 3
"""Half of those that check an honest node."""
CAN: Final = (*sorted(ABILITIES), "class:engine/1/cpu/float32/eager/tp1", "reward:r@0123456789abcdef")
"""All engines are of one class and replay, and all nodes have one reward."""
REWARD: Final = 0.5
"""Of every sample, as honest nodes compute it."""
STEP_S: Final = 0.02
WRITE_EVERY: Final = 8
"""Cases between two turns of the writing task, which handles all messages received meanwhile."""
SEAL_EVERY: Final = 300
MOST_OUT: Final = work.MAX_CAPACITY + 64
"""Allowed messages in answer to one body: a node that requests its full capacity gets one message per lease."""
_NO_SHAME: Final = {None, Reason.TOO_OLD, Reason.WITHDRAWN, Reason.EXPIRED, Reason.UNKNOWN_LEASE, Reason.GIVEN_BACK,
                    Reason.DUPLICATE, Reason.LATE, Reason.NOT_A_MEMBER}  # fmt: skip
"""Verdicts that an honest node may get."""


async def _unsent(peer: bytes, body: bytes) -> None:
    raise AssertionError


class _World(World):
    def __init__(self, rng: random.Random) -> None:
        self.now, self.cases, self.version, self.groups_done, self.adapted_done = 100.0, 0, 3, 0, 0
        self.rewarded_done = 0
        self.rng = random.Random(rng.random())
        self.book = Book(Path(":memory:"))
        ledger = self.book.restore(Settings(), Head(0, 0, root_of(0, 0)), self.now, rng.randbytes(32))
        self.ledger: Ledger = ledger
        self.service = LedgerService(ledger, self.book, _unsent, is_member=lambda node: True, clock=lambda: self.now)
        for version in range(1, 4):
            self.service.sealed(Head(0, version, root_of(0, version)), Change(adapters={"a": 1}))
        self.keys = {key.public: key for key in map(key_of, (f"node {i}" for i in range(HONEST + HOSTILE)))}
        names = list(self.keys)
        self.honest, self.hostile = set(names[:HONEST]), names[HONEST:]
        self.me: Key = self.keys[self.hostile[0]]
        self.given: dict[int, tuple[bytes, work.WorkLease]] = {}
        """By lease number: the node that got the lease, and the lease."""
        self.todo: list[tuple[bytes, work.WorkLease]] = []
        self.serials = 0
        self.session = self.service.open("s", Binding(4, SAMPLING))
        self.adapted = SAMPLING.with_options(adapter="a")
        self.rewarded = SAMPLING.with_options(reward=RewardAsked("r", b'{"answer":"1"}'))
        self.offered = 0
        for node in names:
            self.service.member_up(node)
            self.service.hear(node, work.encode(work.Abilities(CAN, "engine")))
            self._ask(node)
        self._write()

    # ------------------------------------------------------------ the service's task, and the trainer

    def _write(self) -> None:
        """Do one turn of `LedgerService.run` without waiting."""
        service = self.service
        turn = service.begin_turn()
        if turn.facts:
            self.book.write(turn.facts)
        service.take_offers()
        for node, message in turn.outbox:
            self._check_message(node, work.decode(work.encode(message)))
        service.tell_sessions(turn.ready)
        while self.session.groups:
            self._take(self.session.groups.popleft())
        while self.offered < self.session.allowed:
            self.offered += 1
            sampling = {0: self.adapted, 1: self.rewarded}.get(self.offered % 3)
            prompt = pack_tokens((5, 6, self.offered))
            service.offer(self.session, self.offered.to_bytes(16, "little"), prompt, sampling=sampling)
        for group in list(self.session.impossible):
            del self.session.impossible[group]

    def _take(self, group: Any) -> None:
        self.groups_done += 1
        self.adapted_done += bool(group.adapter)
        self.rewarded_done += group.sampling.extra.reward is not None
        for sample, done in group.done.items():
            node, lease = self.given.get(done.lease, (b"", None))
            if lease is None or node != done.node or sample not in lease.samples:
                raise Broken(f"a rollout counts though its node does not hold the lease: {done.lease}")
            work.open_rollout(done.node, done.sealed)
        self.service.taken(group.id)

    def _check_message(self, node: bytes, message: WorkMessage) -> None:
        match message:
            case work.WorkLease(lease=lease):
                self.given[lease] = node, message
                self.todo.append((node, message))
            case work.AskAdapters():
                self.service.hear(node, work.encode(work.LoadedAdapters(("a",))))
            case work.JudgeRequest() if node in self.honest:
                scores = pack_floats((-0.5,) * (message.end - message.start))
                margins = bytes(len(scores)) if message.sampling.extra.portable else b""
                previous = scores if message.previous else b""
                answer = work.JudgeAnswer(message.check, message.epoch, message.version, scores, previous, margins)
                self.service.hear(node, work.encode(answer))
            case work.AskReward() if node in self.honest:
                self.service.hear(node, work.encode(work.RewardAnswer(message.check, REWARD)))
            case work.Verdict(refused=refused) if node in self.honest and refused not in _NO_SHAME:
                raise Broken(f"the rollout of an honest node was refused: {refused}")
            case work.Unfit(reason=reason) if node in self.honest and reason is not Reason.TOO_OLD:
                raise Broken(f"an honest node gets no work: {reason}")

    def _ask(self, node: bytes) -> None:
        self.serials += 1
        holding = tuple(lease for lease, (holder, _) in self.given.items() if holder == node)[-64:]
        request = work.WorkRequest(self.serials, 8, 0, self.version, root_of(0, self.version), 100.0, holding)
        self.service.hear(node, work.encode(request))

    def rollout_of(self, lease: work.WorkLease, sample: int) -> Rollout:
        """Return the rollout of an honest node."""
        tokens = pack_tokens((self.rng.getrandbits(20) + 3, self.rng.getrandbits(20) + 3, 2))
        digest = work.work_hash(lease.group, sample, lease.prompt, lease.sampling)
        span = VersionSpan(0, self.version, root_of(0, self.version), 3)
        claim = None if lease.sampling.extra.reward is None else work.RewardClaim(REWARD)
        logprobs = pack_floats((-0.5,) * 3)
        return Rollout(lease.lease, lease.token, sample, digest, tokens, logprobs, "stop", (span,), b"", b"", claim)

    def _work(self) -> None:
        """Let honest nodes generate the samples that were leased to them."""
        todo, self.todo = self.todo, []
        for node, lease in todo:
            if node in self.honest:
                for sample in lease.samples:
                    sealed = work.seal_rollout(self.keys[node], self.rollout_of(lease, sample))
                    self.service.hear(node, work.encode(work.SignedRollout(sealed)))
            elif self.rng.randrange(3) == 0:
                self.todo.append((node, lease))

    # ------------------------------------------------------------ a case

    def turn(self, rng: random.Random) -> None:
        self.cases += 1
        self.now += STEP_S
        if self.cases % WRITE_EVERY == 0:
            self._work()
            self._write()
        if self.cases % 100 == 0:
            for node in (*self.honest, *self.hostile):
                self._ask(node)
            while len(self.given) > 4096:
                del self.given[next(iter(self.given))]
        if self.cases % SEAL_EVERY == 0:
            self.version += 1
            own = self.ledger.parts.adapters["a"] + 1
            change = Change(base=self.version % 2 == 0, changed=frozenset({"a"}), adapters={"a": own})
            self.service.sealed(Head(0, self.version, root_of(0, self.version)), change)
        if rng.randrange(500) == 0:
            self.service.member_lost(rng.choice(self.hostile))
        if rng.randrange(300) == 0:
            for node in self.hostile:
                self.service.release(node, "")  # otherwise the ledger would ignore its further messages
        self.me = self.keys[rng.choice(self.hostile)]

    def lease(self) -> work.WorkLease:
        """Return the sender's newest lease, or one of another node."""
        mine = [each for node, each in reversed(self.given.values()) if node == self.me.public]
        found = mine or [each for _, each in self.given.values()]
        return found[0] if found else SAMPLES[work.WorkLease]  # type: ignore[return-value]

    def make(self, cls: type) -> WorkMessage:
        """Return a valid message of the sender."""
        sample, lease = SAMPLES[cls], self.lease()
        self.serials += 1
        match sample:
            case work.WorkRequest():
                root = root_of(0, self.version)
                return replace(sample, serial=self.serials, version=self.version, root=root, holding=(lease.lease,))
            case work.Renew() | work.Cannot():
                return replace(sample, lease=lease.lease, token=lease.token)
            case work.GiveBack():
                return replace(sample, leases=(lease.lease,))
            case work.WorkAnswer():
                check = next(iter(self.ledger.quarantine.checks.open), 1)
                return replace(sample, check=check, version=self.version)
            case work.JudgeAnswer():
                check = next(iter(self.ledger.quarantine.verifier.judgements.open), 1)
                return replace(sample, check=check, version=self.version)
            case work.RewardAnswer():
                return replace(sample, check=next(iter(self.ledger.quarantine.rewards.open), 1), value=REWARD)
            case work.SignedRollout():
                return work.SignedRollout(work.seal_rollout(self.me, self.signed()[1]))
        return sample

    def signed(self) -> tuple[Key, Rollout]:
        """Return the sender's key and a rollout of it."""
        lease = self.lease()
        return self.me, self.rollout_of(lease, lease.samples[0]) if lease.samples else sample_rollout()

    def give(self, kind: Kind, data: bytes) -> str:
        outbox = self.service._nodes.outbox
        before = len(outbox)
        self.service.hear(self.me.public, data)
        new = outbox[before:]
        if len(new) > MOST_OUT:
            raise Broken(f"one body led to {len(new)} messages")
        return " ".join(sorted({type(m).__name__ + f" {getattr(m, 'refused', '')}" for _, m in new})) or "nothing"

    def check(self) -> None:
        for node in self.honest:
            found = self.ledger.nodes.get(node)
            if found is None or found.reputation.penalty is not None:
                raise Broken("an honest node is in quarantine")
        if self.cases > 2000 and self.groups_done == 0:
            raise Broken("no group was ever done")
        if self.cases > 2000 and self.adapted_done == 0:
            raise Broken("no group of the adapter was ever done")
        if self.cases > 2000 and self.rewarded_done == 0:
            raise Broken("no group with a reward was ever done")
        if self.cases > 2000 and not self.ledger.quarantine.verifier.counts:
            raise Broken("no sample was ever replayed")
        for group in self.ledger.groups.values():
            if sorted([*group.free, *group.leased, *group.done]) != list(range(group.n)):
                raise Broken("a sample has no state, or two")
        self.service.status()

    def sizes(self) -> dict[str, int]:
        return sizes_of(self.service, "service")

    def close(self) -> None:
        self.book.close()


class LedgerTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "ledger"
    about: ClassVar[str] = "the ledger service, among honest and hostile nodes"
    episode: ClassVar[int] = 5000
    most_entries: ClassVar[int] = 70_000
    """More than `Settings.remembered`, the verdicts that the ledger keeps."""

    def __init__(self) -> None:
        self.kinds = work_kinds(
            lambda world, cls: world.make(cls) if isinstance(world, _World) else SAMPLES[cls],
            lambda world: world.signed() if isinstance(world, _World) else (world.me, sample_rollout()),
        )

    def world(self, rng: random.Random) -> World:
        return _World(rng)

    def types(self) -> dict[str, Any]:
        return {f"Work/{cls.__name__}": cls for cls in MESSAGES} | {"Work/Rollout": Rollout}
