"""Whatever happens in whatever order, with a crash before or after any write: no sample is lost, and none counts twice.

Leases are granted, renewed, given back and expire. Results arrive late, twice, from old versions and over commits.
Nodes come and go, and are quarantined and released. Versions are begun, abandoned and sealed, also while a group is on
its way to the trainer. The ledger crashes and restarts.

The machine plays the other processes: nodes, which know only the leases that reached them and repeat a result until
they get a verdict, and a trainer, which knows what it offered and what it took. A crash discards the ledger. If it
happens before the write, it also discards the messages that the last step would have sent.
"""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_kit import ALICE, BOB, PROMPT, SAMPLING, ask, check_places, draw, group_id, head, root, sealed

from node.ledger.book import Book
from node.ledger.messages import VersionSpan
from node.ledger.settings import Settings
from node.ledger.state import LiveLease

NODES = st.sampled_from([ALICE, BOB])
CRASH = st.sampled_from(["no", "no", "no", "before the write", "after the write"])
SETTINGS = Settings(max_deadline_s=30.0, min_deadline_s=5.0, resend_after_s=0.0, check_share=0.0)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.book = Book(Path(self.folder.name) / "ledger.sqlite")
        self.book._db.execute("pragma synchronous = off")
        self.now = 0.0
        self.head = head(1)
        self.members = {ALICE, BOB}
        self.offered: dict[bytes, int] = {}
        self.taken: list[bytes] = []
        self.known_leases: dict[int, LiveLease] = {}
        """Leases that reached their nodes."""
        self.accepted: dict[tuple[bytes, int], list[bytes]] = {}
        """(group, sample) -> results for which the node got the verdict "accepted"."""
        self.drawn = 0

    @initialize()
    def start(self) -> None:
        self.ledger = self.book.restore(SETTINGS, self.head, self.now)
        for node in self.members:
            self.ledger.member_up(node)
        self.persist("no")

    def teardown(self) -> None:
        """Let honest nodes finish: every offered group reaches the trainer exactly once."""
        self.members = {ALICE, BOB}
        self.now += 1000.0
        for node in self.members:
            self.ledger.member_up(node)
            self.ledger.quarantine.release(node, "at last")
        self.ledger.abandon_version()
        for _ in range(3 * len(self.offered) + 3):
            leases = self.ledger.request_work(ALICE, self.request(64), self.now)
            for lease in leases if isinstance(leases, list) else []:
                for sample in sorted(lease.open):
                    self.deliver(lease, sample, self.head.version, "no")
            while (group := self.ledger.hand_over("s")) is not None:
                self.take(group, "no")
        assert sorted(self.taken) == sorted(self.offered)
        assert not self.ledger.groups
        assert not self.ledger.leases
        self.book.close()
        self.folder.cleanup()

    def persist(self, crash: str) -> bool:
        """Write the facts, or crash. Returns whether messages about them may be sent."""
        facts = self.ledger.take_facts()
        if crash != "before the write":
            self.book.write(facts)
        if crash == "no":
            return True
        self.ledger = self.book.restore(SETTINGS, self.head, self.now)
        for node in self.members:
            self.ledger.member_up(node)
        self.ledger.reopen("s")
        self.book.write(self.ledger.take_facts())
        return False

    def request(self, capacity: int):
        return ask(capacity, self.head.version, rate=1.0)

    def deliver(self, lease: LiveLease, sample: int, version: int, crash: str, *, over: int | None = None) -> None:
        """Deliver a result. `over`: the version that generated the last token, after a commit in between."""
        self.drawn += 1
        spans = None
        if over is not None and over > version:
            spans = (VersionSpan(0, version, root(0, version), 1), VersionSpan(0, over, root(0, over), 2))
        rollout = draw(lease, sample, version, token_ids=(10 + self.drawn, 2), spans=spans)
        signed = sealed(lease, rollout)
        verdict = self.ledger.submit(lease.node, rollout, signed, self.now)
        if not self.persist(crash):  # no verdict arrived, so the node sends the result again
            again = self.ledger.submit(lease.node, rollout, signed, self.now)
            assert (again is None) == (verdict is None)
            self.persist("no")
        if verdict is None:
            self.accepted.setdefault((lease.group, sample), []).append(signed)

    def take(self, group, crash: str) -> None:
        assert group.complete
        if group.id not in self.taken:  # the trainer remembers which groups it has
            self.taken.append(group.id)
            assert len({done.sealed for done in group.done.values()}) == group.n
        self.ledger.taken(group.id, 0.0)
        self.persist(crash)

    def in_quarantine(self, node: bytes) -> bool:
        found = self.ledger.nodes.get(node)
        return found is not None and found.reputation.penalty is not None

    # ------------------------------------------------------------ events

    @rule(n=st.integers(1, 4), lag=st.sampled_from([0, 1, 1]), crash=CRASH)
    def offer(self, n: int, lag: int, crash: str) -> None:
        new = group_id(len(self.offered))
        self.ledger.offer(new, "s", PROMPT, n, SAMPLING, max_lag=lag)
        if not self.persist(crash):  # the trainer offers the unconfirmed group again
            self.ledger.offer(new, "s", PROMPT, n, SAMPLING, max_lag=lag)
            self.persist("no")
        self.offered[new] = n

    @rule(node=NODES, capacity=st.integers(0, 6), crash=CRASH)
    def lease(self, node: bytes, capacity: int, crash: str) -> None:
        leases = self.ledger.request_work(node, self.request(capacity), self.now)
        if self.persist(crash) and isinstance(leases, list):
            self.known_leases.update({lease.id: lease for lease in leases})

    @precondition(lambda self: self.known_leases)
    @rule(data=st.data(), lag=st.sampled_from([0, 0, 0, 1, 2]), carried=st.booleans(), crash=CRASH)
    def submit(self, data: st.DataObject, lag: int, carried: bool, crash: str) -> None:
        lease = self.known_leases[data.draw(st.sampled_from(sorted(self.known_leases)))]
        sample = data.draw(st.sampled_from(lease.samples))
        over = self.head.version if carried else None
        self.deliver(lease, sample, max(0, self.head.version - lag), crash, over=over)

    @precondition(lambda self: self.known_leases)
    @rule(data=st.data(), crash=CRASH)
    def give_back(self, data: st.DataObject, crash: str) -> None:
        lease = self.known_leases[data.draw(st.sampled_from(sorted(self.known_leases)))]
        self.ledger.give_back(lease.node, [lease.id], self.now)
        self.persist(crash)

    @rule(node=NODES, seconds=st.sampled_from([None, 5.0]), crash=CRASH)
    def quarantine(self, node: bytes, seconds: float | None, crash: str) -> None:
        self.ledger.quarantine.quarantine(node, "for a test", seconds, self.now)
        self.persist(crash)
        assert self.in_quarantine(node) or crash == "before the write"

    @rule(node=NODES, crash=CRASH)
    def release(self, node: bytes, crash: str) -> None:
        self.ledger.quarantine.release(node, "for a test")
        self.persist(crash)
        assert not self.in_quarantine(node) or crash == "before the write"

    @precondition(lambda self: self.known_leases)
    @rule(data=st.data(), tokens=st.integers(1, 16))
    def renew(self, data: st.DataObject, tokens: int) -> None:
        lease = self.known_leases[data.draw(st.sampled_from(sorted(self.known_leases)))]
        self.ledger.renew(lease.node, lease.id, lease.token, tokens, self.now)
        self.persist("no")

    @rule(seconds=st.floats(0.1, 40.0), crash=CRASH)
    def wait(self, seconds: float, crash: str) -> None:
        self.now += seconds
        self.ledger.tick(self.now)
        self.persist(crash)

    @rule(node=NODES, crash=CRASH)
    def come_or_go(self, node: bytes, crash: str) -> None:
        if node in self.members:
            self.members.discard(node)
            self.ledger.member_lost(node, self.now)
        else:
            self.members.add(node)
            self.ledger.member_up(node)
        self.persist(crash)

    @rule(crash=CRASH)
    def seal(self, crash: str) -> None:
        self.head = head(self.head.version + 1)
        self.ledger.advance(self.head)
        self.persist(crash)

    @rule(crash=CRASH)
    def begin(self, crash: str) -> None:
        self.ledger.begin_version((0, self.head.version + 1))
        self.persist(crash)

    @rule()
    def abandon(self) -> None:
        self.ledger.abandon_version()

    @rule(overtaken=st.booleans(), crash=CRASH)
    def hand_over(self, overtaken: bool, crash: str) -> None:
        group = self.ledger.hand_over("s")
        if group is None:
            return
        if overtaken:  # a version is sealed while the group is on its way
            self.seal("no")
        if self.ledger.discard_stale(group.id, self.head.name):
            self.persist(crash)
        else:
            assert all(done.oldest[1] >= self.head.version - group.max_lag for done in group.done.values())
            self.take(group, crash)

    # ------------------------------------------------------------ invariants

    @invariant()
    def every_sample_is_in_one_place(self) -> None:
        check_places(self.ledger)
        unknown = set(self.offered) - set(self.ledger.groups) - set(self.taken)
        assert not unknown, "an offered group is neither here nor with the trainer"

    @invariant()
    def no_group_is_too_old(self) -> None:
        for group in self.ledger.groups.values():
            for done in group.done.values():
                _, newest = self.ledger.head.counted_from(group.max_lag)
                assert group.handed_over or done.oldest[1] >= newest - group.max_lag

    @invariant()
    def no_accepted_result_is_lost(self) -> None:
        """The newest accepted result is still there, unless it became too old or the trainer has the group."""
        for (group, sample), heard in self.accepted.items():
            if group in self.taken:
                continue
            done = self.ledger.groups[group].done.get(sample)
            discarded = self.book.discarded(group, sample)
            assert len(heard) <= 1 + discarded, "counted twice"
            assert (done is not None and done.sealed == heard[-1]) or discarded >= len(heard)


World.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
TestWorld = World.TestCase
