"""Cheating nodes and lying checkers among nodes that replay, acted out in memory against a real ledger."""

import math

import msgspec
import numpy as np
import pytest
from verify_kit import EXACT, SAMPLING, Arena, BestOfTwo, Cold, Exact, Lies, Model, NeverEnds, Player, Stale, head

from node.engines.arithmetic import class_label
from node.engines.base import REPLAYS
from node.ledger.book import Book
from node.ledger.messages import JudgeAnswer, Rollout, VersionSpan
from node.ledger.node_messages import _judge_request
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.part_history import PartHistory
from node.ledger.settings import Settings
from node.ledger.trust.judgements import Judgements
from node.verification.assignment import FIRST
from node.verification.classes import ArithmeticClass
from node.verification.evidence import THRESHOLD
from node.verification.mismatches import replay_context
from node.verification.opinions import Kind


class ExactStale(Stale, Exact):
    pass


class ExactCold(Cold, Exact):
    pass


class ExactNeverEnds(NeverEnds, Exact):
    pass


class ExactBestOfTwo(BestOfTwo, Exact):
    pass


def know(arena: Arena, numbers: int) -> None:
    """The class has so many good numbers, of nodes that are gone."""
    verifier = arena.verifier
    own = next(iter(verifier._panels.values()), None) or verifier.panel(next(iter(arena.players)), arena.sampling)
    assert own.replays is not None
    for kind in (Kind.UNLIKE, Kind.APART):
        verifier.counts.add(replay_context(kind, own.replays), b"gone", 0, numbers)


def swarm(*others, honest: int = 8, known: int = 2_048, **settings) -> tuple[list[Player], Arena]:
    players = [Exact(i, others[0].model if others else Model()) for i in range(honest)]
    arena = Arena([*players, *others], check_share=1.0, **settings)
    know(arena, known)
    return players, arena


@pytest.mark.parametrize(("known", "samples"), [(2_048, 3), (384, 4)])
def test_a_cheat_whose_samples_always_mismatch_is_found_within_a_few(known, samples):
    found = ExactStale(8, Model())
    players, arena = swarm(found, known=known)
    assert arena.play(samples, until=found)
    tally = arena.verifier.record(found.node).tallies[Kind.UNLIKE]
    assert (tally.numbers, len(tally.starts)) == (samples, samples)
    assert "not those that its weights and the leased noise give" in arena.penalty(found).why
    assert f"{samples} of {samples} replayed samples" in arena.penalty(found).why
    assert all(arena.penalty(player) is None for player in players)
    assert all(arena.verifier.record(player.node).log <= 0.0 for player in players)


@pytest.mark.parametrize("cheat", [ExactCold, ExactNeverEnds, ExactBestOfTwo])
def test_a_cheat_that_is_often_honest_is_found(cheat):
    found = cheat(8, Model())
    players, arena = swarm(found)
    assert arena.play(60, until=found)
    assert all(arena.penalty(player) is None for player in players)


def test_honest_nodes_agree_to_the_bit_and_one_opinion_is_enough():
    players, arena = swarm(honest=9)
    arena.play(30)
    records = [arena.verifier.record(player.node) for player in players]
    assert all(record.tallies[Kind.UNLIKE].numbers >= FIRST for record in records)
    assert all(not record.kinds for record in records), "replays feed no test by checker"
    assert not arena.verifier._doubted
    opinions = sum(record.checks for record in records) / sum(r.tallies[Kind.UNLIKE].numbers for r in records)
    assert 1.0 < opinions < 2.0, "now and then three, to compare checkers"
    assert any(Kind.APART in record.tallies for record in records)


# ------------------------------------------------------------ who is asked to replay


def requests(arena: Arena, author: Player) -> set[bool]:
    arena._judge = lambda: None
    arena.play(1)
    due = arena.ledger.quarantine.due_judgements(arena.now)
    found = {(request.replay, request.previous) for _, check in due if check.author == author.node
             for request in [_judge_request(check, check.version, has_previous=True)]}  # fmt: skip
    assert all(replay != previous for replay, previous in found)
    return {replay for replay, _ in found}


@pytest.mark.parametrize(
    ("author", "panel", "replay"),
    [
        (EXACT, EXACT, True),
        (EXACT, EXACT - {REPLAYS}, False),
        (EXACT - {REPLAYS}, EXACT, False),
        ({name for name in EXACT if not name.startswith("class:")}, EXACT, False),
        ({name for name in EXACT if not name.startswith("class:")}, None, False),
        (EXACT, {*EXACT, "class:a/1/cpu/f32/sdpa/tp1"}, False),
    ],
)
def test_only_a_panel_of_one_named_class_that_replays_is_asked_to(author, panel, replay):
    model = Model()
    players = [Exact(i, model) for i in range(5)]
    players[0].abilities = frozenset(author)
    for player in players[1:]:
        player.abilities = frozenset(author if panel is None else panel)
    arena = Arena(players, check_share=1.0)
    assert requests(arena, players[0]) == {replay}


def test_those_of_a_class_that_cannot_replay_are_not_in_a_panel_that_does():
    model = Model()
    players = [Exact(i, model) for i in range(7)]
    for player in players[4:]:
        player.abilities = EXACT - {REPLAYS}
    arena = Arena(players)
    nodes, replays = arena.verifier.panel(players[0].node, arena.sampling)
    assert replays is not None
    assert set(nodes) == {player.node for player in players[1:4]}
    nodes, replays = arena.verifier.panel(players[4].node, arena.sampling)
    assert replays is None
    assert len(nodes) == 6


# ------------------------------------------------------------ checkers that lie


def one_bit(answer: JudgeAnswer) -> JudgeAnswer:
    scores = np.frombuffer(answer.scores, "<f4").copy()
    scores[0] = np.nextafter(scores[0], np.float32(-99.0))
    return msgspec.structs.replace(answer, scores=scores.tobytes())


def loses(answer: JudgeAnswer) -> JudgeAnswer:
    return msgspec.structs.replace(answer, margins=pack_floats([1e-3]) + answer.margins[4:])


def far_off(answer: JudgeAnswer) -> JudgeAnswer:
    return msgspec.structs.replace(answer, scores=pack_floats([-9.0] * (len(answer.scores) // 4)))


LIES = {"one bit": one_bit, "a margin": loses, "far off": far_off}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("liars", [1, 3])
def test_checkers_that_lie_are_found_and_harm_nobody(lie, liars):
    """Nine or eleven nodes; fewer than half of each panel lie."""
    model = Model()
    liars = [Lies(Exact(8 + i, model), lie) for i in range(liars)]
    honest, arena = swarm(*liars)
    for _ in range(40):
        arena.play(1)
        if all(arena.penalty(liar) is not None for liar in liars):
            break
    assert all("differ from those of the rest of its panel" in arena.penalty(liar).why for liar in liars)
    assert all(arena.penalty(player) is None for player in honest)
    assert max(arena.verifier.record(player.node).log for player in honest) <= 0.0
    tallies = [arena.verifier.record(liar.node).tallies[Kind.APART] for liar in liars]
    assert max(tally.numbers for tally in tallies) <= 16


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize(("honest", "lying"), [(5, 4), (2, 2)])
def test_half_of_the_panel_that_tells_one_lie_harms_nobody(lie, honest, lying):
    """The honest ones have panels of eight with four liars, or of three with two."""
    model = Model()
    players, arena = swarm(*(Lies(Exact(honest + i, model), lie) for i in range(lying)), honest=honest)
    arena.play(20)
    assert all(arena.penalty(player) is None for player in players)
    assert max(arena.verifier.record(player.node).log for player in players) < THRESHOLD / 2


def test_three_of_eight_that_shield_a_cheat_do_not_save_it_and_are_found():
    """They know what it claims, and say that they found just that."""
    model = Model()
    cheat = ExactStale(8, model)
    players = [Exact(i, model) for i in range(5)]

    class Shields(Exact):
        def judge(self, check):
            answer = super().judge(check)
            if check.author != cheat.node:
                return answer
            claims = pack_floats(list(check.claimed))
            return msgspec.structs.replace(answer, scores=claims, margins=bytes(len(answer.margins)))

    shields = [Shields(5 + i, model) for i in range(3)]
    arena = Arena([*players, *shields, cheat], check_share=1.0)
    know(arena, 2_048)
    assert arena.play(12, until=cheat)
    assert all(arena.penalty(player) is None for player in players)
    apart = [arena.verifier.record(shield.node).tallies[Kind.APART].starts for shield in shields]
    assert all(apart), "each differed from the rest of the panel"


def test_a_liar_that_makes_samples_undecided_shields_nobody_and_lost_checkers_cost_only_time():
    model = Model()
    cheat = ExactStale(8, model)
    lost = [Lies(Exact(9 + i, model), lambda answer: None) for i in range(3)]
    players, arena = swarm(cheat, *lost, honest=8)

    def later() -> None:
        arena.now += 31.0
        arena.ledger.tick(arena.now)
        arena_judge()

    arena_judge, arena._judge = arena._judge, later
    assert arena.play(24, until=cheat)
    assert all(arena.penalty(player) is None for player in (*players, *lost))


def test_the_panel_of_an_author_in_doubt_is_asked_at_once():
    cheat = ExactStale(8, Model())
    _, arena = swarm(cheat, known=0)
    wanted = []
    begin = arena.verifier.judgements.begin

    def noted(author, *args, **kwargs):
        check = begin(author, *args, **kwargs)
        wanted.append((author, check.wanted))
        return check

    arena.verifier.judgements.begin = noted
    arena.play(3)
    of_cheat = [count for author, count in wanted if author == cheat.node]
    assert of_cheat[0] in (1, 3)
    assert of_cheat[1:] == [8, 8]
    assert max(count for author, count in wanted if author != cheat.node) == 3


@pytest.mark.parametrize(("first", "judged"), [(False, (2, 7, (0, 4))), (True, (0, 2, (0, 3)))])
def test_of_an_engine_that_keeps_old_keys_the_first_span_is_judged(first, judged):
    spans = tuple(VersionSpan(0, version, bytes(32), end) for version, end in ((3, 2), (4, 7), (5, 9)))
    floats = pack_floats((-1.0,) * 9)
    rollout = Rollout(1, 1, 0, bytes(32), pack_tokens(range(9)), floats, "stop", spans)
    check = Judgements(Settings(), PartHistory()).begin(
        b"author", b"group", rollout, b"", SAMPLING, 7, [b"checker"], 1, 0.0, first_span=first
    )
    assert (check.start, check.end, check.version) == judged


@pytest.mark.parametrize("attention", ["sdpa", "kept-sdpa"])
def test_the_class_tells_whether_an_engine_keeps_old_keys(attention):
    label = class_label("transformers", "5.23.0", "cpu-avx512", "float32", attention, 1, "1f3a9c02")
    assert ArithmeticClass.named({label}, "").keeps_keys == (attention == "kept-sdpa")


# ------------------------------------------------------------ what survives


def test_counts_and_tallies_survive_a_restart_and_the_convicted_leave_the_counts(tmp_path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = book.restore(Settings(silent_s=math.inf, check_share=1.0), head(3), 0.0)
    model = Model()
    players, cheat = [Exact(i, model) for i in range(8)], ExactStale(8, model)
    arena = Arena([*players, cheat], ledger=ledger, sampling=SAMPLING)
    arena.ledger.take_facts = list  # kept for the book
    arena.play(30, until=cheat)
    assert arena.penalty(cheat) is not None
    book.write(ledger.transitions.facts)
    verifier = ledger.quarantine.verifier
    again = book.restore(Settings(silent_s=math.inf), head(3), 0.0).quarantine.verifier
    (own,) = {found.replays for found in verifier._panels.values()} or {
        verifier.panel(players[0].node, SAMPLING).replays
    }
    for kind in (Kind.UNLIKE, Kind.APART):
        context = replay_context(kind, own)
        assert again.counts.others(context, b"") == verifier.counts.others(context, b"") != (0, 0)
    assert again.counts.others(replay_context(Kind.UNLIKE, own), b"")[0] == 0, "the cheat's are gone"
    for player in (*players, cheat):
        assert again.record(player.node).tallies == verifier.record(player.node).tallies
