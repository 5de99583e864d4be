"""A swarm in memory whose nodes draw from a small model and judge each other through a real `Ledger`.

The model is a table of logits by the token before. A version differs from the one before by a small step. Rounding is
noise on each log-probability, of a size that depends on the class of the node.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from codec.sign import Key
from node.engines.base import JUDGES, OPTIONS, PORTABLE_DRAWS, REPLAYS, SamplingParams
from node.ledger.assignment.draws import sampling_of
from node.ledger.messages import (
    JudgeAnswer,
    Reason,
    Rollout,
    VersionSpan,
    WorkRequest,
    seal_rollout,
    stream_of,
    work_hash,
)
from node.ledger.packing import pack_floats, pack_tokens, unpack_tokens
from node.ledger.rules import Ledger
from node.ledger.settings import Settings
from node.ledger.state import Head, LiveLease
from node.ledger.trust.judgements import OpenJudgement

VOCABULARY, END = 48, 2
ABLE = frozenset({OPTIONS, PORTABLE_DRAWS, JUDGES})
EXACT = ABLE | {REPLAYS, "class:transformers/5.0/cpu-avx512-1f3a9c02/bfloat16/sdpa/tp1"}
SAMPLING = SamplingParams(max_tokens=64, stop_tokens=(END,), seed=11)
PROMPT = (5, 6, 7)


def head(version: int) -> Head:
    return Head(0, version, bytes([version % 256]) * 32)


class Model:
    """Log-probabilities of each version. `step`: nats by which a version differs from the one before."""

    def __init__(self, step: float = 0.002, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.normal(0.0, 2.0, (VOCABULARY, VOCABULARY))
        logits[:, END] = logits.max() - 5.0
        self._tables: dict[tuple[bool, float], np.ndarray] = {}
        self._versions = {True: logits, False: logits + rng.normal(0.0, step, logits.shape)}
        self.gumbel = lru_cache(64)(self._gumbel)

    def table(self, *, stale: bool = False, temperature: float = 1.0) -> np.ndarray:
        """(last token, token)"""
        if (key := (stale, temperature)) not in self._tables:
            rows = self._versions[stale] / temperature
            self._tables[key] = rows - np.logaddexp.reduce(rows, axis=1)[:, None]
        return self._tables[key]

    @staticmethod
    def _gumbel(seed: int, stream: int, tokens: int) -> np.ndarray:
        """(position, token); quicker than `node.verification.noise`, and as good here."""
        return np.random.default_rng([seed, stream]).gumbel(size=(tokens, VOCABULARY))


Draws = tuple[list[int], list[float]]


class Player:
    """A node. `rounding`: nats by which its log-probabilities are off. `kind`: its class. `draw`: how it draws."""

    abilities = ABLE

    def __init__(self, number: int, model: Model, rounding: float = 0.0015, kind: str = "transformers/f32/cpu") -> None:
        self.key = Key(bytes([number + 1]) * 32)
        self.node = self.key.public
        self.model, self.rounding, self.kind = model, rounding, kind
        self.rng = np.random.default_rng(number)

    def signs(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling that it says it was leased."""
        return sampling

    def off(self, shape) -> np.ndarray:
        return self.rng.normal(0.0, self.rounding, shape)

    def draw(self, sampling: SamplingParams, stream: int) -> Draws:
        return self.draws(sampling, stream)

    def draws(
        self,
        sampling: SamplingParams,
        stream: int,
        *,
        stale: bool = False,
        temperature: float = 1.0,
        suppress: bool = False,
    ) -> Draws:
        right = self.model.table(stale=stale)
        drawn = self.model.table(stale=stale, temperature=temperature)
        noise = self.model.gumbel(sampling.seed, stream, sampling.max_tokens)
        noise = noise + self.off(noise.shape)
        if suppress:
            noise[:, END] = -np.inf
        tokens = [PROMPT[-1]]
        while len(tokens) <= sampling.max_tokens and tokens[-1] != END:
            tokens.append(int(np.argmax(drawn[tokens[-1]] + noise[len(tokens) - 1])))
        claims = right[tokens[:-1], tokens[1:]] + self.off(len(tokens) - 1)
        return tokens[1:], list(np.minimum(claims, 0.0))

    def judge(self, check: OpenJudgement) -> JudgeAnswer:
        tokens = unpack_tokens(check.rollout.token_ids)[: check.end]
        lasts, now = [PROMPT[-1], *tokens[:-1]], self.model.table()
        scores, previous = (
            np.minimum(table[lasts, tokens] + self.off(len(tokens)), 0.0)
            for table in (now, self.model.table(stale=True))
        )
        noise = self.model.gumbel(check.sampling.seed, check.stream, check.sampling.max_tokens)[: len(tokens)]
        noisy = now[lasts] + noise + self.off(noise.shape)
        margins = np.minimum(noisy.max(1) - noisy[np.arange(len(tokens)), tokens], 8.0)
        portable = check.sampling.extra.portable
        values = (scores, [] if check.replays else previous, margins if portable else [])
        parts = [pack_floats(list(part[check.start :])) for part in values]
        return JudgeAnswer(check.id, *check.version, *parts)


class Exact(Player):
    """Its engine replays: all nodes of its class have the same bits."""

    abilities = EXACT

    def __init__(self, number: int, model: Model) -> None:
        super().__init__(number, model, rounding=0.0)


class Stale(Player):
    """Draws from the version before."""

    def draw(self, sampling: SamplingParams, stream: int) -> Draws:
        return self.draws(sampling, stream, stale=True)


class BestOfTwo(Player):
    """Draws twice and sends the sample that it likes better."""

    def draw(self, sampling: SamplingParams, stream: int) -> Draws:
        return max(self.draws(sampling, stream), self.draws(sampling, stream + 1), key=lambda found: sum(found[0]))


class NeverEnds(Player):
    """Suppresses the end of the text."""

    def draw(self, sampling: SamplingParams, stream: int) -> Draws:
        return self.draws(sampling, stream, suppress=True)


class Cold(Player):
    """Draws at another temperature than it was asked for."""

    def draw(self, sampling: SamplingParams, stream: int) -> Draws:
        return self.draws(sampling, stream, temperature=0.8)


class Replays(Player):
    """Returns text that was drawn for another stream."""

    def draw(self, sampling: SamplingParams, stream: int) -> Draws:
        return self.draws(sampling, stream + 1)


@dataclass
class Lies:
    """A checker's lie: changes its answer."""

    player: Player
    change: Callable[[JudgeAnswer], JudgeAnswer | None]

    def __getattr__(self, name: str):
        return getattr(self.player, name)

    def judge(self, check: OpenJudgement) -> JudgeAnswer | None:
        return self.change(self.player.judge(check))


class Arena:
    """A ledger with players. `play` lets each draw a sample in turn, and carries the requests for judgements."""

    def __init__(self, players: list, *, ledger: Ledger | None = None, sampling: SamplingParams = SAMPLING, **settings):
        self.sampling = sampling
        self.players = {player.node: player for player in players}
        self.ledger = ledger or Ledger(Settings(**({"silent_s": 1e9} | settings)), head(0), bytes(range(32)))
        self.ledger.advance(head(3))
        for player in players:
            self.ledger.member_up(player.node)
            node = self.ledger.nodes[player.node]
            node.abilities, node.kind = player.abilities, player.kind
        self.now = 1.0
        self.groups = 0
        self.verdicts: list[Reason | None] = []
        self.checked: dict[bytes, int] = {}
        """Tokens of a node that were checked since it could be compared with honest traffic."""

    @property
    def verifier(self):
        return self.ledger.quarantine.verifier

    def penalty(self, player: Player):
        return self.ledger.nodes[player.node].reputation.penalty

    def play(self, rounds: int, until: Player | None = None) -> bool:
        """Whether `until` was convicted within so many rounds."""
        for _ in range(rounds):
            for node in list(self.players):
                self._work(node)
                self._judge()
            if until is not None and self.penalty(until) is not None:
                return True
        return False

    def _work(self, node: bytes) -> None:
        if self.ledger.nodes[node].reputation.penalty is None:
            lease = self.lease(node)
            self.submit(lease)
            self.ledger.taken(lease.group, self.now)
            for other in self.ledger.nodes.values():
                other.version = (0, 3)

    def lease(self, node: bytes) -> LiveLease:
        """Offer a group, and lease it to `node`."""
        group = self.groups.to_bytes(16, "little")
        self.groups += 1
        self.now += 0.1
        self.ledger.offer(group, "s", pack_tokens(PROMPT), 1, self.sampling)
        request = WorkRequest(self.groups, 1, 0, 3, head(3).root, 0.0, ())
        (lease,) = self.ledger.request_work(node, request, self.now)
        return lease

    def submit(self, lease: LiveLease) -> None:
        """The node draws and submits the sample."""
        player, group = self.players[lease.node], lease.group
        sampling = sampling_of(self.ledger.groups[group], bool(lease.portable))
        tokens, claims = player.draw(sampling, stream_of(group, 0, sampling))
        rollout = Rollout(
            lease=lease.id,
            token=lease.token,
            sample=0,
            work=work_hash(group, 0, pack_tokens(PROMPT), player.signs(sampling)),
            token_ids=pack_tokens(tokens),
            logprobs=pack_floats(claims),
            finish_reason="stop" if tokens[-1] == END else "length",
            spans=(VersionSpan(0, 3, head(3).root, len(tokens)),),
        )
        self.now += 1.0
        self.verdicts.append(self.ledger.submit(lease.node, rollout, seal_rollout(player.key, rollout), self.now))

    def _judge(self) -> None:
        while due := self.ledger.quarantine.due_judgements(self.now):
            for node, check in due:
                if self.verifier.record(check.author).kinds:
                    self.checked[check.author] = self.checked.get(check.author, 0) + check.tokens
                if (answer := self.players[node].judge(check)) is not None:
                    self.ledger.quarantine.hear_judgement(node, answer, self.now)
        self.ledger.take_facts()
