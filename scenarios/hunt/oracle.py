"""What is true in a run, kept outside of all machines, and the violations that were found.

The trainer tells the oracle the bits of each version before it publishes them. The machines' hooks tell it what is
shown to others: seals, blocks, verdicts, groups. A `Violation` is recorded when the two disagree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from codec import Layout, state_root
from codec.staging import block_hash
from node.ledger.book import Book
from node.ledger.rules import Ledger
from node.ledger.state import AcceptedRollout, Group, LiveLease
from scenarios.hunt.diary import Diary
from swarm.protocol.core.version import VersionId

__all__ = ["Oracle", "Violation", "root_of_bits"]

Blocks = tuple[NDArray[np.uint16], ...]
"""The bits of a model, block by block."""
Versions = tuple[tuple[int, int], ...]
"""(epoch, version) of each token."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant did not hold."""

    name: str
    """Of the invariant."""
    text: str
    at_s: float
    """Virtual time."""


def root_of_bits(layout: Layout, blocks: Sequence[NDArray[np.uint16]]) -> bytes:
    """The root of a model with these bits."""
    hashes = np.stack([np.frombuffer(block_hash(block), np.uint8) for block in blocks])
    return state_root(layout.hash, hashes)


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


@dataclass
class Oracle:
    """The truth about one run."""

    layout: Layout
    bits: dict[bytes, Blocks] = field(default_factory=dict)
    """By root: the bits of every version that the trainer has begun to publish."""
    roots: dict[VersionId, bytes] = field(default_factory=dict)
    """Of every version that was shown to anybody."""
    used: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """By request group that the trainer has trained on: its samples, as they were signed."""
    offered: set[bytes] = field(default_factory=set)
    signed: set[bytes] = field(default_factory=set)
    """All samples in `used`."""
    now: float = 0.0
    diary: Diary = field(default_factory=Diary)
    violations: list[Violation] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None
    """Ends the run."""
    suspects: set[bytes] = field(default_factory=set)
    """Keys of the machines that may send wrong bytes, because a fault made them do so."""
    banned: set[bytes] = field(default_factory=set)
    """Keys that the seed has banned: for minutes they may hold no newer version."""
    bugs: list[BaseException] = field(default_factory=list)
    """Errors that are no one's input's fault, with their tracebacks."""
    boot: int = 0
    """The number of the seed's newest start."""
    granted: int = 0
    """The highest id or token of a work lease that a node was sent."""
    answered: set[tuple[int, int]] = field(default_factory=set)
    """(lease, sample) of the rollouts that the seed has given a verdict on."""
    drawn: dict[tuple[bytes, bytes], set[Versions]] = field(default_factory=dict)
    """By (node, tokens): the versions by which its engine has drawn these tokens."""
    _accepted: dict[tuple[int, int], tuple[bytes, AcceptedRollout]] = field(default_factory=dict)
    """By (lease, sample): the group, and the rollout that the ledger accepted."""
    _told: dict[tuple[bytes, int], AcceptedRollout] = field(default_factory=dict)
    """By (group, sample): the newest rollout whose node was told that it counts."""

    @property
    def newest(self) -> VersionId:
        """The newest version that was shown to anybody."""
        return max(self.roots, default=VersionId(0, 0))

    def violate(self, name: str, text: str) -> None:
        """Record a violation; the run ends at once."""
        self.violations.append(Violation(name, text, self.now))
        self.stop()

    def check(self, name: str, holds: object, text: str) -> None:
        """Record a violation unless `holds`."""
        if not holds:
            self.violate(name, text)

    def noticed(self, key: bytes) -> None:
        """Somebody noticed that something is wrong with the machine of this key."""
        self.diary.noticed_s.append((self.now, key))

    # ------------------------------------------------------------ versions

    def begun(self, blocks: Blocks) -> bytes:
        """The trainer begins to publish these bits. Returns their root."""
        root = root_of_bits(self.layout, blocks)
        self.bits[root] = blocks
        return root

    def shown(self, version: VersionId, root: bytes, where: str) -> None:
        """A machine shows others a seal, or holds a version."""
        known = self.roots.setdefault(version, root)
        self.diary.sealed_s.setdefault(version, self.now)
        self.check("one root a version", known == root, f"{where}: {version} has two roots")
        self.check("no forged version", root in self.bits, f"{where}: {version} has a root that no trainer published")

    def started(self, version: VersionId, where: str) -> None:
        """The seed starts, with this version as its newest."""
        self.check("no sealed version lost", version >= self.newest, f"{where}: {version} after {self.newest}")

    def booted(self, boot: int, where: str) -> None:
        """The seed starts under this boot number, which members compare to tell an older process from a newer one."""
        self.check("no boot number twice", boot > self.boot, f"{where}: boot {boot} after {self.boot}")
        self.boot = max(self.boot, boot)

    def check_bits(self, version: VersionId, blocks: Sequence[NDArray[np.uint16]], where: str) -> None:
        """`blocks` are said to be those of `version`."""
        root = self.roots.get(version)
        if root is None:
            self.violate("no forged version", f"{where}: holds {version}, which nobody has sealed")
            return
        self._compare(version, root, blocks, where)

    def restored(self, version: VersionId, root: bytes, blocks: Sequence[NDArray[np.uint16]], where: str) -> None:
        """A start would restore `version`; perhaps its seal was durable and not yet shown to anybody."""
        known = self.roots.get(version, root)
        self.check("one root a version", known == root, f"{where}: {version} has two roots")
        if root in self.bits:
            self._compare(version, root, blocks, where)
        else:
            self.violate("no forged version", f"{where}: {version} has a root that no trainer published")

    def _compare(self, version: VersionId, root: bytes, blocks: Sequence[NDArray[np.uint16]], where: str) -> None:
        wrong = [
            number for number, (found, true) in enumerate(zip(blocks, self.bits[root], strict=True))
            if not np.array_equal(found, true)
        ]  # fmt: skip
        self.check("no wrong bit", not wrong, f"{where}: blocks {wrong} are not those of {version}")

    # ------------------------------------------------------------ work

    def accepted(self, ledger: Ledger, lease: LiveLease, done: AcceptedRollout, sample: int, now: float) -> None:
        """The ledger accepts a rollout."""
        ended_s, name = now - lease.deadline, "no lease past its end"
        self.check(name, ended_s <= 0, f"a rollout of lease {lease.id} counts {ended_s:.1f} s after its end")
        self.check(name, lease.node == done.node, f"a rollout of lease {lease.id} is another node's")
        self.check(name, lease.token == done.rollout.token, f"a rollout of lease {lease.id} has another token")
        head, oldest = VersionId(*ledger.head.name), VersionId(*done.oldest)
        lag = ledger.groups[lease.group].max_lag
        fresh = oldest.epoch == head.epoch and oldest.version + lag >= head.version
        self.check("no rollout too old", fresh, f"a token of {oldest} was accepted at head {head}, lag {lag}")
        self._check_drawn(done)
        self._accepted[lease.id, sample] = lease.group, done
        self.diary.accepted_s.append(now)

    def drew(self, node: bytes, tokens: Sequence[int], versions: Versions) -> None:
        """The engine of `node` has drawn `tokens`, each by the version that it had then."""
        self.drawn.setdefault((node, _packed(tokens)), set()).add(versions)

    def _check_drawn(self, done: AcceptedRollout) -> None:
        """An honest node names the versions that its engine had."""
        if done.node in self.suspects:
            return
        named: list[tuple[int, int]] = []
        for span in done.rollout.spans:
            named += [(span.epoch, span.version)] * (span.end - len(named))
        right = tuple(named) in self.drawn.get((done.node, done.rollout.token_ids), ())
        self.check("no wrong version", right, f"a rollout of lease {done.lease} names versions that did not draw it")

    def leased(self, lease: int, token: int) -> None:
        """A node is sent a work lease."""
        self.granted = max(self.granted, lease, token)

    def told(self, lease: int, sample: int, *, accepted: bool) -> None:
        """A node is told what became of its rollout: it may forget it."""
        self.answered.add((lease, sample))
        if accepted and (found := self._accepted.get((lease, sample))) is not None:
            self._told[found[0], sample] = found[1]

    def ledger_started(self, ledger: Ledger, book: Book) -> None:
        """The ledger was restored: everything that counted is there, was discarded, is too old, or is the trainer's;
        and no lease will have the id or token of an earlier one."""
        self.check(
            "no lease id twice", ledger.table.next_id > self.granted, f"lease {ledger.table.next_id} comes again"
        )
        for (group, sample), told in self._told.items():
            where = f"sample {sample} of group {group.hex()[:8]}"
            known = ledger.groups.get(group)
            if known is None:
                self.check("no rollout lost", group in self.used or book.was_taken(group), f"{where} is gone")
                continue
            done = known.done.get(sample)
            kept = done is not None and done.sealed == told.sealed
            old = ledger.head.lag_reason(told.oldest, known.max_lag, ledger.parts)
            self.check("no rollout lost", kept or old or book.discarded(group, sample), f"{where} is gone")

    def check_samples(self, ledger: Ledger) -> None:
        """Each sample of a group is free, leased, done or dropped, and only one of these."""
        for group in ledger.groups.values():
            found = sorted((*group.free, *group.leased, *group.done, *group.dropped))
            self.check("each sample once", found == list(range(group.n)), f"group {group.id.hex()[:8]} has {found}")

    def trained(self, group: Group, head: VersionId, max_lag: int) -> None:
        """The trainer trains on a group, while `head` is the newest version that it knows."""
        samples = tuple(done.sealed for _, done in sorted(group.done.items()))
        self.check("no rollout twice", group.id not in self.used, f"group {group.id.hex()[:8]} was used twice")
        self.check("no rollout lost", len(samples) == group.n, f"{len(samples)} of {group.n} samples")
        again = self.signed.intersection(samples)
        self.check("no rollout twice", not again and len(set(samples)) == len(samples), "a sample was used twice")
        self.check("no work unasked", group.id in self.offered, f"group {group.id.hex()[:8]} was never offered")
        for done in group.done.values():
            oldest = VersionId(*done.oldest)
            fresh = oldest.epoch == head.epoch and oldest.version + max_lag >= head.version
            self.check("no rollout too old", fresh, f"a token of {oldest} at head {head}, lag {max_lag}")
            for span in done.rollout.spans:
                version = VersionId(span.epoch, span.version)
                true = self.roots.get(version)
                self.check("no wrong bit", span.root == true, f"a rollout of {version} names another root")
        self.used[group.id] = samples
        self.signed.update(samples)
