"""Samples of an adapter are judged only by nodes that hold that adapter with the same bits: never against the base."""

from verify_kit import ABLE, EXACT, SAMPLING, Arena, Exact, Model, Player

from node.engines.base import ADAPTERS, JUDGES_ADAPTERS, SCORE_OPTIONS, SamplingParams
from node.ledger.messages import JudgeAnswer
from node.ledger.part_history import Change
from node.ledger.trust.judgements import OpenJudgement
from node.ledger.trust.verifier import drawn_by
from node.verification.classes import ArithmeticClass
from node.verification.mismatches import replay_context

ADAPTED = SAMPLING.with_options(adapter="a")
CAN = frozenset({ADAPTERS, JUDGES_ADAPTERS})
BASE_MODEL = Model()
ADAPTER_MODEL = Model(seed=1)
"""The base with the adapter: entirely other logits."""


class Adapted(Player):
    """Draws and judges with the adapter where it is asked to. `model`: the base."""

    abilities = ABLE | CAN

    def of(self, sampling: SamplingParams) -> Model:
        return ADAPTER_MODEL if sampling.extra.adapter else BASE_MODEL

    def draw(self, sampling: SamplingParams, stream: int):
        self.model = self.of(sampling)
        return super().draw(sampling, stream)

    def judge(self, check: OpenJudgement) -> JudgeAnswer:
        self.model = self.of(check.sampling)
        return super().judge(check)


class BaseOnly(Adapted):
    """Says that it draws with the adapter, and draws by the base."""

    def of(self, sampling: SamplingParams) -> Model:
        return BASE_MODEL


class ExactAdapted(Adapted, Exact):
    abilities = EXACT | CAN


class OldJudge(Player):
    """Draws with adapters, and judges without: whatever it is asked, it computes by the base."""

    abilities = ABLE | {ADAPTERS}

    def draw(self, sampling: SamplingParams, stream: int):
        self.model = ADAPTER_MODEL if sampling.extra.adapter else BASE_MODEL
        return super().draw(sampling, stream)

    def judge(self, check: OpenJudgement) -> JudgeAnswer:
        self.model = BASE_MODEL
        return super().judge(check)


class AdapterArena(Arena):
    """An arena whose head is (0, 3), a step of the adapter `a`; all nodes have loaded it."""

    def __init__(self, players: list, **settings: object) -> None:
        super().__init__(players, sampling=ADAPTED, **settings)
        self.ledger.parts.note((0, 4), Change(base=False, changed=frozenset({"a"}), adapters={"a": 1}))
        self.ledger.head = self.ledger.head._replace(version=3)
        for node in self.ledger.nodes.values():
            node.adapters = frozenset({"a"})


def players(kind: type, count: int, first: int = 0) -> list:
    return [kind(first + i, BASE_MODEL) for i in range(count)]


def test_honest_nodes_that_judge_with_the_adapter_accuse_nobody():
    for kind in (Adapted, ExactAdapted):
        everybody = players(kind, 6)
        arena = AdapterArena(everybody, check_share=0.5)
        arena.play(60)
        assert arena.verdicts == [None] * len(arena.verdicts)
        assert arena.verifier.judgements.answered > 50
        assert all(arena.penalty(player) is None for player in everybody)


def test_a_node_that_draws_by_the_base_alone_is_found():
    for kind, honest in ((BaseOnly, Adapted), (type("X", (BaseOnly, ExactAdapted), {}), ExactAdapted)):
        cheat = kind(9, BASE_MODEL)
        arena = AdapterArena([*players(honest, 6), cheat], check_share=0.5)
        assert arena.play(60, until=cheat)
        others = [player for player in arena.players.values() if player is not cheat]
        assert all(arena.penalty(player) is None for player in others)


def test_nobody_is_judged_where_no_engine_judges_with_adapters():
    """Its judgements would be by the base, and convict honest nodes."""
    everybody = players(OldJudge, 6)
    arena = AdapterArena(everybody, check_share=1.0)
    arena.play(20)
    assert arena.verifier.judgements.begun == 0
    assert arena.ledger.quarantine.checks.begun == 0, "nor would a check ever be made"
    assert all(arena.penalty(player) is None for player in everybody)
    arena.sampling = SAMPLING
    arena.play(5)
    assert arena.verifier.judgements.answered, "samples of the base are judged as ever"
    assert all(arena.penalty(player) is None for player in everybody)


def test_engines_that_judge_by_the_base_are_not_asked_beside_those_that_can():
    old, able = players(OldJudge, 6), players(Adapted, 4, first=10)
    arena = AdapterArena([*old, *able], check_share=1.0)
    asked = set()
    for node in list(arena.players) * 3:
        arena._work(node)
        while due := arena.ledger.quarantine.due_judgements(arena.now):
            asked |= {checker for checker, _ in due}
            for checker, check in due:
                arena.ledger.quarantine.hear_judgement(checker, arena.players[checker].judge(check), arena.now)
    assert asked
    assert asked <= {player.node for player in able}
    assert all(arena.penalty(player) is None for player in arena.players.values())


def test_a_judge_is_asked_when_it_holds_the_adapters_bits():
    everybody = players(Adapted, 5)
    arena = AdapterArena(everybody, check_share=1.0)
    author, *judges = everybody
    arena.submit(arena.lease(author.node))
    (check,) = arena.verifier.judgements.open.values()
    nodes = arena.ledger.nodes

    def due() -> set[bytes]:
        check.asked.clear()
        check.declined.clear()
        return {node for node, found in arena.ledger.quarantine.due_judgements(arena.now) if found is check}

    check.wanted = 4
    for player in judges:
        nodes[player.node].version = (0, 3)
    nodes[judges[0].node].adapters = frozenset({"b"})
    assert due() == {player.node for player in judges[1:]}, "one has not loaded it"
    for number, change in (
        (5, Change(base=False, changed=frozenset({"b"}), adapters={"a": 1, "b": 1})),
        (6, Change(base=False, changed=frozenset({"a"}), adapters={"a": 2, "b": 1})),
    ):
        arena.ledger.parts.note((0, number), change)
    nodes[judges[1].node].version = (0, 4)
    nodes[judges[2].node].version = (0, 6)
    assert due() == {judges[3].node}, "the others hold other bits of it"
    assert check.declined == {judges[1].node, judges[2].node}
    check.version = (0, 4)
    nodes[judges[3].node].version = (0, 5)
    assert due() == {judges[1].node, judges[3].node}, "version 5 left it as it was"
    answer = judges[3].judge(check)
    later = JudgeAnswer(answer.check, 0, 5, answer.scores, b"", answer.margins)
    assert arena.verifier.judgements.answer(judges[3].node, later) is check, "named by what the node holds"


def test_a_check_by_scoring_is_made_with_the_adapter_or_not_at_all():
    scorers = players(OldJudge, 2) + players(Adapted, 1, first=5)
    for player in scorers:
        player.abilities = frozenset({ADAPTERS, SCORE_OPTIONS, "options"})
    scorers[2].abilities |= {JUDGES_ADAPTERS}
    arena = AdapterArena(scorers, check_share=1.0)
    arena.submit(arena.lease(scorers[0].node))
    checks = arena.ledger.quarantine.checks
    assert checks.begun == 1
    for node in arena.ledger.nodes.values():
        node.version = (0, 3)
    assert arena.ledger.quarantine.next_check(scorers[1].node, arena.now) is None, "it scores by the base"
    arena.ledger.nodes[scorers[2].node].adapters = frozenset()
    assert arena.ledger.quarantine.next_check(scorers[2].node, arena.now) is None, "it has not loaded it"
    arena.ledger.nodes[scorers[2].node].adapters = frozenset({"a"})
    assert arena.ledger.quarantine.next_check(scorers[2].node, arena.now) is not None
    arena.submit(arena.lease(scorers[2].node))
    assert checks.begun == 1, "nobody else can score it"


def test_the_numbers_of_adapters_are_kept_apart():
    """Rounding differs from one adapter to another, and what is learned of one must accuse nobody of another."""
    other = SAMPLING.with_options(adapter="b")
    assert len({drawn_by(ADAPTED), drawn_by(other), drawn_by(SAMPLING)}) == 3
    own = ArithmeticClass.named(EXACT, "transformers/f32/cpu")
    assert replay_context("unlike", own) != replay_context("unlike", own, adapted=True)
