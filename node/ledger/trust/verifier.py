"""The verifier: draws which rollouts are checked, learns what honest numbers are like, and keeps the evidence. Pure.

`node.verification` has the statistics, `node.ledger.trust.judgements` who is asked. Whoever is proven to lie is named
to the caller, which puts it into quarantine.
"""

import math
from collections.abc import Callable, Mapping, Set
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from node.engines.base import JUDGES, JUDGES_ADAPTERS, PORTABLE_DRAWS, REPLAYS, SamplingParams, Version, scoring_needs
from node.ledger.facts import EvidenceHeld, NumberFound, NumbersDropped, SampleCounted
from node.ledger.messages import JudgeAnswer, Rollout, stream_of
from node.ledger.settings import Settings
from node.ledger.state import Group, Node
from node.ledger.transitions import Transitions
from node.ledger.trust.checks import tolerated
from node.ledger.trust.judgements import OPINIONS, Judgements, OpenJudgement
from node.verification.assignment import check_share, checkers, commitment, is_checked, nonce_of, panel, wants_more
from node.verification.classes import ArithmeticClass, names_class
from node.verification.evidence import LEAST_CHECKERS, THRESHOLD, dropped
from node.verification.mismatches import Counts, replay_context
from node.verification.nulls import Nulls, context_of
from node.verification.opinions import (
    AT_ONCE,
    AT_ONCE_TOKENS,
    BY_REPLAY,
    OF_AUTHORS,
    REACH,
    TOKEN_AT_ONCE,
    Kind,
    Opinion,
    author_numbers,
    checker_numbers,
    difference,
    worst_token,
)
from node.verification.record import NodeRecord
from node.verification.replays import all_alike, weigh

__all__ = ["Liar", "Verifier"]

SUSPICIOUS: Final = math.log(20.0)
"""What one checker holds against a node, from which on that checker is compared with others more often, and the node's
own opinions are always: one honest node in twenty ever gets there with a given checker."""
KNOWN: Final = 384
"""Numbers of other nodes beside which a few mismatches weigh enough: until then all of a new node's first samples are
checked."""
SUMS: Final[Mapping[Kind, str]] = {
    Kind.STALE: "its log-probabilities are those of the version before",
    Kind.DRAWN: "its tokens were not drawn as they were leased",
    Kind.CLAIMS: "its log-probabilities are not those of its tokens",
    Kind.SCORES: "its opinions on other nodes' samples disagree with those of other checkers",
    Kind.STEPS: "its opinions on other nodes' samples disagree with those of other checkers",
    Kind.UNLIKE: "its tokens are not those that its weights and the leased noise give",
    Kind.APART: "its opinions differ from those of the rest of its panel",
}


class Liar(NamedTuple):
    """A node that is proven to lie, and by what."""

    node: bytes
    why: str


class Panel(NamedTuple):
    """The nodes that may judge what an author drew. `replays`: their class and the author's, if all of them replay."""

    nodes: list[bytes]
    replays: ArithmeticClass | None


class Verifier:
    """`transitions` and `members` belong to the ledger. `secret`: 32 bytes that only the seed knows.

    A period of the nonce is one version of the head: `period` is set by the ledger when it changes.
    """

    def __init__(self, transitions: Transitions, members: Set[bytes], secret: bytes) -> None:
        self.judgements = Judgements(transitions.settings, transitions.parts)
        self.records: dict[bytes, NodeRecord] = {}
        self.nulls = Nulls()
        self.counts = Counts()
        self._doubted: set[bytes] = set()
        """Authors whose last sample was not alike: the whole panel is asked about the next one at once."""
        self._panels: dict[tuple[bytes, frozenset[str]], Panel] = {}
        """By author and what its sampling needs; of the nodes as they are."""
        self._changed: set[bytes] = set()
        """Nodes whose evidence has changed since the last look at it."""
        self.drifts = 0
        """How often the numbers of half a class moved together, and its evidence was dropped."""
        self._settings: Settings = transitions.settings
        self._transitions = transitions
        self._members = members
        self._secret = secret
        self._nonce = b""
        self.period: Version = (0, 0)
        self.begin_period((0, 0))

    # ------------------------------------------------------------ the nonce

    def begin_period(self, version: Version) -> None:
        """The head is `version`: its nonce counts from now on."""
        self.period, self._nonce = version, self._nonce_of(version)

    def _nonce_of(self, version: Version) -> bytes:
        epoch, number = version
        return nonce_of(self._secret, (epoch << 40) + number % (1 << 40))

    @property
    def commitment(self) -> bytes:
        """The hash of the nonce of the present period, which may be published."""
        return commitment(self._nonce)

    @property
    def next_commitment(self) -> bytes:
        """The hash of the nonce of the version after the head, published before it counts."""
        return commitment(self._nonce_of((self.period[0], self.period[1] + 1)))

    @property
    def opened(self) -> bytes:
        """The nonce of the version before the head, whose period is over. Empty: there is none in this epoch."""
        epoch, number = self.period
        return self._nonce_of((epoch, number - 1)) if number else b""

    # ------------------------------------------------------------ drawing

    def record(self, node: bytes) -> NodeRecord:
        """What is held against `node`."""
        return self.records.setdefault(node, NodeRecord())

    def draws(self, sealed: bytes) -> bool:
        """Whether a rollout of a node that no panel can judge is checked by a second node."""
        return is_checked(self._nonce, sealed, self._settings.check_share)

    def panel(self, author: bytes, sampling: SamplingParams) -> Panel:
        """The nodes that may judge what `author` drew by `sampling`."""
        needed = {JUDGES, *scoring_needs(sampling)} | ({PORTABLE_DRAWS} if sampling.extra.portable else set())
        if (key := (author, frozenset(needed))) not in self._panels:
            self._panels[key] = self._draw_panel(author, needed)
        return self._panels[key]

    def _draw_panel(self, author: bytes, needed: Set[str]) -> Panel:
        able = {
            key: node
            for key in self._members
            if (node := self._transitions.nodes.get(key)) is not None
            and (key == author or (node.reputation.penalty is None and needed <= (node.abilities or frozenset())))
        }
        classes = {key: class_of(node) for key, node in able.items()}
        own = classes.get(author)
        replaying = {key for key, node in able.items() if own == classes[key] and _replays(node, needed)}
        if own is not None and author in replaying and len(replaying) > LEAST_CHECKERS:
            return Panel(panel(self._secret, author, dict.fromkeys(replaying, own)), own)
        return Panel(panel(self._secret, author, classes), None)

    def pick(
        self, author: bytes, group: Group, sampling: SamplingParams, rollout: Rollout, sealed: bytes, now: float
    ) -> bool:
        """Draw whether an accepted rollout is judged. False: too few nodes are able to, or the class of the author is
        unknown, because it has not said what its engine is."""
        if self._settings.check_share == 0.0 or self._transitions.node(author).abilities is None:
            return False
        chosen, replays = self.panel(author, sampling)
        if len(chosen) < LEAST_CHECKERS:
            return False
        record = self.record(author)
        floor = min(1.0, self._settings.check_share / 2.0)
        share = check_share(record.samples, record.log, floor, measured=self._is_measured(author, sampling, replays))
        record.samples += 1
        if not is_checked(self._nonce, sealed, share) or self.judgements.full:
            return True
        classes = {node: class_of(self._transitions.node(node)) for node in (author, *chosen)}
        order = checkers(self._nonce, sealed, author, classes)
        suspects = [checker for checker in order if self.record(checker).suspicious(SUSPICIOUS)]
        order = sorted(order, key=lambda checker: (checker != order[0], checker not in suspects))
        samples = 0 if record.suspicious(SUSPICIOUS) else record.samples
        wanted = OPINIONS if suspects or wants_more(self._nonce, sealed, samples) else 1
        wanted = len(order) if author in self._doubted else wanted
        stream = stream_of(group.id, rollout.sample, sampling)
        self.judgements.begin(
            author,
            group.id,
            rollout,
            group.prompt,
            sampling,
            stream,
            order,
            wanted,
            now,
            replays,
            first_span=classes[author].keeps_keys,
        )
        return True

    def _is_measured(self, author: bytes, sampling: SamplingParams, replays: ArithmeticClass | None) -> bool:
        """Whether enough is known to compare the author with others."""
        if replays is None:
            return bool(self.record(author).kinds)
        context = replay_context(Kind.UNLIKE, replays, adapted=bool(sampling.extra.adapter))
        return self.counts.others(context, author)[1] >= KNOWN

    def nodes_changed(self) -> None:
        """A node came, left, was quarantined or released, or said what it can do."""
        self._panels.clear()

    def due(self, now: float) -> list[tuple[bytes, OpenJudgement]]:
        """Who is to be asked about what now."""
        return self.judgements.due(self._version_of, now) if self.judgements.open else []

    def _version_of(self, node: bytes, adapter: str) -> Version | None:
        found = self._transitions.nodes.get(node)
        if found is None or node not in self._members:
            return None
        return found.version if not adapter or adapter in found.adapters else None

    # ------------------------------------------------------------ answers

    def answer(self, node: bytes, answer: JudgeAnswer, now: float) -> list[Liar]:
        """What `node` computed. Returns the nodes that are proven to lie by now."""
        check = self.judgements.answer(node, answer)
        if check is not None:
            record = self.record(node)
            record.opinions += 1
            self._count(check, node)
            unlike = check.replays is not None and not all_alike(check.claimed, check.found)
            if unlike or self._is_beyond_rounding(check, check.found[node]):
                check.wanted = len(check.checkers)
        return self.tick(now)

    def tick(self, now: float) -> list[Liar]:
        """End the judgements that are over. Returns the nodes that are proven to lie by now."""
        liars: dict[bytes, Liar] = {}
        for check in self.judgements.close_settled(now):
            if check.replays is None:
                self._compare(check)
            else:
                self._weigh(check, check.replays)
            if (liar := self._at_once(check)) is not None:
                liars[liar.node] = liar
        for node in sorted(self._changed):
            record = self.record(node)
            if record.proven and node not in liars and not self._is_penalized(node) and not self._drifts(node):
                liars[node] = Liar(node, self._why(record))
        self._changed.clear()
        return list(liars.values())

    def _count(self, check: OpenJudgement, node: bytes) -> None:
        """The first opinion on a sample counts for its author's evidence. A second one would repeat the same chance.
        Replays count when all have answered."""
        record, opinion = self.record(check.author), check.found[node]
        record.checks += 1
        record.tokens += check.tokens if len(check.found) == 1 else 0
        self._note(check.author)
        if len(check.found) > 1 or check.replays is not None:
            return
        for kind, value in author_numbers(check.claimed, opinion, check.sampling.temperature).items():
            self._bet(check, kind, check.author, node, value)

    def _compare(self, check: OpenJudgement) -> None:
        """Each checker is compared with the next one: one number each."""
        found = list(check.found.items())
        for (subject, theirs), (checker, ours) in zip(found, found[1:] + found[:1], strict=True):
            if subject == checker:
                return
            for kind, value in checker_numbers(theirs, ours, check.sampling.temperature).items():
                self._bet(check, kind, subject, checker, value)

    def _weigh(self, check: OpenJudgement, own: ArithmeticClass) -> None:
        """All opinions are in: one number of the author, and one of each checker that another one answered with."""
        weighed = weigh(check.claimed, check.found, len(check.checkers))
        adapted = bool(check.adapter)
        unlike = replay_context(Kind.UNLIKE, own, adapted=adapted)
        self._tally(Kind.UNLIKE, unlike, check.author, weighed.author)
        for checker, apart in weighed.checkers.items():
            self._tally(Kind.APART, replay_context(Kind.APART, own, adapted=adapted), checker, apart)
        (self._doubted.discard if all_alike(check.claimed, check.found) else self._doubted.add)(check.author)

    def _tally(self, kind: Kind, context: bytes, node: bytes, mismatch: bool | None) -> None:
        """None: undecided, which is no mismatch of the node's own, but one where it is somebody's measure."""
        others = self.counts.others(context, node)
        self.record(node).count(kind, context, mismatch=mismatch is True, others=others)
        self.counts.add(context, node, mismatch is not False)
        self._transitions.facts.append(SampleCounted(context, node, mismatch is not False))
        self._changed.add(node)
        self._note(node)

    def _bet(self, check: OpenJudgement, kind: Kind, subject: bytes, checker: bytes, value: float) -> None:
        theirs, ours = (class_of(self._transitions.node(node)) for node in (subject, checker))
        context = context_of(kind, theirs, ours, check.tokens, drawn_by(check.sampling))
        null = self.nulls.of(context, subject, REACH[kind])
        if null is not None:
            self.record(subject).add(kind, checker, null, value)
            self._changed.add(subject)
        self.nulls.add(context, checker, subject, value)
        self._transitions.facts.append(NumberFound(context, checker, subject, value))
        self._note(subject)

    def _note(self, node: bytes) -> None:
        """The record of `node` changed: the last of a turn's facts about it is enough."""
        fact = EvidenceHeld(node, self.record(node).to_bytes())
        facts = self._transitions.facts
        for i in range(len(facts) - 1, max(-1, len(facts) - 16), -1):
            found = facts[i]
            if isinstance(found, EvidenceHeld) and found.node == node:
                facts[i] = fact
                return
        facts.append(fact)

    # ------------------------------------------------------------ proofs

    def _is_beyond_rounding(self, check: OpenJudgement, opinion: Opinion) -> bool:
        # Where keys are kept, a prompt that was half read at a commit moves tokens, by as much as versions differ.
        exact = check.replays is not None and not check.replays.keeps_keys
        if exact and worst_token(check.claimed, opinion) >= TOKEN_AT_ONCE:
            return True
        bound = tolerated(self._settings.check_tolerance, check.sampling)
        claims = _off(check, opinion) > bound * max(1.0, (AT_ONCE_TOKENS / check.tokens) ** 0.5)
        return claims or (check.tokens >= AT_ONCE_TOKENS and opinion.mean_margin >= AT_ONCE)

    def _at_once(self, check: OpenJudgement) -> Liar | None:
        """The author is proven by one sample, if more of its panel than may lie find it beyond any rounding."""
        bad = [opinion for opinion in check.found.values() if self._is_beyond_rounding(check, opinion)]
        if len(bad) <= dropped(len(check.checkers)) or self._is_penalized(check.author):
            return None
        worst = min(worst_token(check.claimed, opinion) for opinion in bad)
        margin = min(opinion.mean_margin for opinion in bad)
        off = min(_off(check, opinion) for opinion in bad)
        if check.replays is not None and worst >= TOKEN_AT_ONCE:
            what = f"one of its tokens is off by {worst:.3g} nats"
        elif margin >= AT_ONCE:
            what = f"its tokens lose by {margin:.3g} nats each"
        else:
            what = f"off by {off:.3g} nats a token"
        return Liar(check.author, f"{len(bad)} of {len(check.found)} nodes judged one of its samples false: {what}")

    def _is_penalized(self, node: bytes) -> bool:
        found = self._transitions.nodes.get(node)
        return found is not None and found.reputation.penalty is not None

    def _drifts(self, node: bytes) -> bool:
        """Whether half of the other nodes of its class are suspected, too: then it is the numbers that moved, and all
        that was learned of the class is dropped. So cheats that are half of a class are not found by evidence."""
        own = class_of(self._transitions.node(node))
        others = [
            key
            for key, record in self.records.items()
            if key != node and record.checks and key in self._members and class_of(self._transitions.node(key)) == own
        ]
        suspected = sum(self.records[key].log >= THRESHOLD / 2.0 for key in others)
        if len(others) < 2 or 2 * suspected < len(others):
            return False
        self.drifts += 1
        self.nulls, self.counts = Nulls(), Counts()
        self._transitions.facts.append(NumbersDropped(None))
        for key in (node, *others):
            self.clear(key)
        return True

    def _why(self, record: NodeRecord) -> str:
        kind = record.worst
        evidence = f"evidence {math.exp(min(record.log, 700.0)):.1e}"
        if kind in BY_REPLAY:
            tally = record.tallies[kind]
            return f"{SUMS[kind]}: {len(tally.starts)} of {tally.numbers:,} replayed samples, {evidence}"
        checkers = len(record.of(kind).checkers)
        amount = f"{record.tokens:,} of its tokens" if kind in OF_AUTHORS else f"{record.opinions:,} of its opinions"
        return f"{SUMS[kind]}: {checkers} nodes, {amount}, {evidence}"

    # ------------------------------------------------------------ the life of a record

    def convicted(self, node: bytes) -> None:
        """`node` was proven to lie: what it found does not count any more."""
        self.nulls.forget(node)
        self.counts.forget(node)
        self._doubted.discard(node)
        self._transitions.facts.append(NumbersDropped(node))
        self.judgements.refuse(node)

    def clear(self, node: bytes) -> None:
        """The record of `node` begins anew: a person released it."""
        self._doubted.discard(node)
        if self.records.pop(node, None) is not None:
            self._note(node)

    def resume(self, node: bytes, record: NodeRecord) -> None:
        """Take in a record that the book kept."""
        self.records[node] = record

    def forget(self, keep: Callable[[bytes], bool]) -> None:
        """Drop the records of nodes that the ledger has forgotten."""
        for node in [node for node in self.records if not keep(node)]:
            del self.records[node]
            self._doubted.discard(node)


def class_of(node: Node) -> ArithmeticClass:
    """The class that a node's engine names."""
    return _named(node.abilities or frozenset(), node.kind)


def _replays(node: Node, needed: Set[str]) -> bool:
    """Whether its engine replays what needs these abilities, and names the class in which it does."""
    abilities = node.abilities
    return abilities is not None and {REPLAYS} | (needed & {JUDGES_ADAPTERS}) <= abilities and names_class(abilities)


_named = lru_cache(4096)(ArithmeticClass.named)


def drawn_by(sampling: SamplingParams) -> bytes:
    """What decides the distribution of a sample's tokens, apart from seeds and lengths."""
    options = msgspec.structs.replace(sampling.drawing.extra, stop_texts=(), special=False, seeded=False, exact=False)
    return blake3(
        msgspec.msgpack.encode((sampling.temperature, sampling.top_p, msgspec.structs.replace(options, min_tokens=0)))
    ).digest(8)


def _off(check: OpenJudgement, opinion: Opinion) -> float:
    """How far the author's claims are from a checker's scores, nats per token."""
    return difference(np.asarray(check.claimed), opinion.scores)
