"""Cheating nodes and lying checkers, acted out in memory against a real ledger."""

import math

import msgspec
import numpy as np
import pytest
from verify_kit import (
    ABLE,
    PROMPT,
    SAMPLING,
    Arena,
    BestOfTwo,
    Cold,
    Lies,
    Model,
    NeverEnds,
    Player,
    Replays,
    Stale,
    head,
)

from node.engines.base import SamplingOptions, SamplingParams
from node.ledger.book import Book
from node.ledger.messages import JudgeAnswer, Reason, WorkRequest
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.rules import Ledger
from node.ledger.settings import Settings
from node.verification.assignment import FIRST, commitment
from node.verification.evidence import THRESHOLD, Null
from node.verification.opinions import Kind


def swarm(cheat: type[Player], honest: int = 6, **settings) -> tuple[list[Player], Player, Arena]:
    model = Model()
    players = [Player(i, model) for i in range(honest)]
    found = cheat(honest, model)
    return players, found, Arena([*players, found], **settings)


@pytest.mark.parametrize(
    ("cheat", "why"),
    [
        (Stale, "the version before"),
        pytest.param(NeverEnds, "not drawn as they were leased", marks=pytest.mark.long),
        (Cold, "not drawn as they were leased"),
    ],
)
@pytest.mark.slow
def test_a_cheat_is_found_by_evidence_and_no_honest_node(cheat, why):
    players, found, arena = swarm(cheat, honest=8, check_share=1.0)
    assert arena.play(800, until=found)
    assert why in arena.penalty(found).why
    assert arena.penalty(found).until is None, "until a person releases it"
    assert all(arena.penalty(player) is None for player in players)
    assert max(arena.verifier.record(player.node).log for player in players) < THRESHOLD / 2


@pytest.mark.parametrize("cheat", [BestOfTwo, Replays])
def test_text_of_another_stream_is_found_at_once(cheat):
    players, found, arena = swarm(cheat)
    assert arena.play(4, until=found), "within four samples"
    assert "judged one of its samples false" in arena.penalty(found).why
    assert all(arena.penalty(player) is None for player in players)


def test_the_rollouts_of_a_cheat_that_were_not_handed_over_are_generated_again():
    _, found, arena = swarm(Replays)
    arena.play(4, until=found)
    done = [done.node for group in arena.ledger.groups.values() for done in group.done.values()]
    assert found.node not in done


# ------------------------------------------------------------ checkers


def scores_off(by: float):
    def change(answer: JudgeAnswer) -> JudgeAnswer:
        scores = np.minimum(np.frombuffer(answer.scores, "<f4") + by, 0.0)
        return msgspec.structs.replace(answer, scores=pack_floats(scores.tolist()))

    return change


def against_the_step(answer: JudgeAnswer) -> JudgeAnswer:
    """Scores moved away from the version before: every honest claim then has a slope of one more."""
    scores, previous = (np.frombuffer(part, "<f4").astype(float) for part in (answer.scores, answer.previous))
    return msgspec.structs.replace(answer, scores=pack_floats(np.minimum(2 * scores - previous, 0.0).tolist()))


def large_margins(answer: JudgeAnswer) -> JudgeAnswer:
    return msgspec.structs.replace(answer, margins=pack_floats([0.5] * (len(answer.margins) // 4)))


LIES = [
    pytest.param(scores_off(-1.0), id="scores", marks=pytest.mark.long),
    pytest.param(against_the_step, id="slopes"),
    pytest.param(large_margins, id="margins", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_checker_that_lies_alone_is_found_and_harms_nobody(lie):
    model = Model()
    honest, liar = [Player(i, model) for i in range(8)], Lies(Player(8, model), lie)
    arena = Arena([*honest, liar], check_share=1.0)
    assert arena.play(900, until=liar)
    assert "opinions" in arena.penalty(liar).why
    assert all(arena.penalty(player) is None for player in honest)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("lie", LIES)
def test_half_of_the_checkers_that_tell_the_same_lie_harm_nobody(lie):
    """Nine nodes: each honest one has eight checkers, of which four lie."""
    model = Model()
    honest = [Player(i, model) for i in range(5)]
    arena = Arena([*honest, *(Lies(Player(i, model), lie) for i in range(5, 9))], check_share=1.0)
    arena.play(300)
    assert all(arena.penalty(player) is None for player in honest)
    assert max(arena.verifier.record(player.node).log for player in honest) < THRESHOLD / 2


def test_two_colluding_checkers_of_three_convict_nobody():
    model = Model()
    honest = [Player(i, model) for i in range(2)]
    arena = Arena([*honest, *(Lies(Player(i, model), scores_off(-1.0)) for i in (2, 3))], check_share=1.0)
    arena.play(200)
    assert all(arena.penalty(player) is None for player in honest)


def without(part: str, value: bytes = b""):
    return lambda answer: msgspec.structs.replace(answer, **{part: value})


def put(value: float):
    def change(answer: JudgeAnswer) -> JudgeAnswer:
        scores = np.frombuffer(answer.scores, "<f4").copy()
        scores[0] = value
        return msgspec.structs.replace(answer, scores=scores.tobytes())

    return change


BAD = {
    "nan": put(math.nan),
    "infinite": put(-math.inf),
    "above 0": put(0.5),
    "missing": without("scores"),
    "no margins": without("margins"),
    "longer": lambda answer: msgspec.structs.replace(answer, scores=answer.scores + pack_floats([-1.0])),
    "shorter margins": lambda answer: msgspec.structs.replace(answer, margins=answer.margins[:-4]),
    "margin below 0": lambda answer: msgspec.structs.replace(answer, margins=pack_floats([-1.0]) + answer.margins[4:]),
    "another version": lambda answer: msgspec.structs.replace(answer, version=answer.version - 1),
    "lost": lambda answer: None,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_an_answer_that_is_none_costs_its_author_nothing(bad):
    model = Model()
    players = [Player(i, model) for i in range(5)]
    useless = Lies(Player(5, model), bad)
    arena = Arena([*players, useless])
    arena.play(FIRST)
    arena.now += 31.0  # a lost checker is passed over
    arena.play(1)
    verifier = arena.verifier
    assert verifier.record(useless.node).opinions == 0
    assert all(arena.penalty(player) is None for player in (*players, useless))
    assert all(verifier.record(player.node).checks >= FIRST for player in players), "others were asked"
    assert useless.node not in {
        checker for record in verifier.records.values() for kind in record.kinds.values() for checker in kind.checkers
    }


def test_only_what_was_asked_for_counts_and_only_once():
    _, author, arena = swarm(Player, honest=5)
    arena._judge = lambda: None
    arena.play(1)
    due = arena.ledger.quarantine.due_judgements(arena.now)
    node, check = next((node, check) for node, check in due if check.author == author.node)
    answer = arena.players[node].judge(check)
    stranger = next(other for other in arena.players if other not in check.asked and other != check.author)
    arena.ledger.quarantine.hear_judgement(stranger, answer, arena.now)
    arena.ledger.quarantine.hear_judgement(author.node, answer, arena.now)
    assert not check.found
    arena.ledger.quarantine.hear_judgement(node, answer, arena.now)
    arena.ledger.quarantine.hear_judgement(node, answer, arena.now)
    arena.ledger.quarantine.hear_judgement(node, msgspec.structs.replace(answer, check=10**6), arena.now)
    assert list(check.found) == [node]
    assert arena.verifier.record(author.node).checks == 1


def test_a_checker_that_leaves_is_replaced_and_an_author_in_quarantine_is_not_checked_on():
    _, author, arena = swarm(Player, honest=5)
    arena._judge = lambda: None
    arena.play(1)
    due = arena.ledger.quarantine.due_judgements(arena.now)
    node, check = next((node, check) for node, check in due if check.author == author.node)
    arena.ledger.member_lost(node, arena.now)
    again = [other for other, found in arena.ledger.quarantine.due_judgements(arena.now) if found is check]
    assert again
    assert node not in again
    arena.ledger.quarantine.quarantine(author.node, "a test", None, arena.now)
    assert check.id not in arena.verifier.judgements.open


def test_a_checker_whose_engine_holds_another_version_is_passed_over():
    _, author, arena = swarm(Player, honest=5)
    arena._judge = lambda: None
    arena.play(1)
    judgements = arena.verifier.judgements
    (check,) = (check for check in judgements.open.values() if check.author == author.node)
    judgements.open = {check.id: check}
    arena.ledger.nodes[check.checkers[0]].version = (0, 4)
    asked = [node for node, _ in arena.ledger.quarantine.due_judgements(arena.now)]
    assert asked == check.checkers[1 : 1 + check.wanted]


def test_judgements_are_given_up_after_their_time_and_bounded():
    _, _, arena = swarm(Player, honest=5)
    arena._judge = lambda: None
    arena.play(20)
    judgements = arena.verifier.judgements
    assert len(judgements.open) == arena.ledger.settings.checks_open
    assert len(arena.ledger.quarantine.due_judgements(arena.now)) <= 4 * 6, "each checker has few at a time"
    arena.ledger.tick(arena.now + arena.ledger.settings.check_ttl_s + 1.0)
    assert not judgements.open
    assert judgements.given_up == arena.ledger.settings.checks_open


# ------------------------------------------------------------ which draws are leased


def test_leases_ask_for_portable_draws_only_where_the_node_is_able_and_nobody_said_how_to_draw():
    def leased(arena: Arena, **offer) -> bool:
        player = next(iter(arena.players.values()))
        group = bytes([len(arena.ledger.groups) + 1]) * 16
        sampling = offer.pop("sampling", SAMPLING)
        arena.ledger.offer(group, "s", pack_tokens(PROMPT), 1, sampling, **offer)
        leases = arena.ledger.request_work(
            player.node, WorkRequest(len(arena.ledger.groups), 9, 0, 3, head(3).root, 0.0, ()), 1.0
        )
        assert isinstance(leases, list)
        return next(lease for lease in leases if lease.group == group).portable

    model = Model()
    arena = Arena([Player(i, model) for i in range(4)])
    assert leased(arena)
    assert not leased(arena, whole=True), "bits of a whole group must not depend on the node"
    assert not leased(arena, sampling=msgspec.structs.replace(SAMPLING, temperature=0.0))
    assert not leased(arena, sampling=msgspec.structs.replace(SAMPLING, options=SamplingOptions(top_k=5)))
    assert not leased(Arena([Player(i, model) for i in range(4)], portable_draws=False))
    unable = Arena([Player(i, model) for i in range(4)])
    for node in unable.ledger.nodes.values():
        node.abilities = ABLE - {"portable-draws"}
    assert not leased(unable)


class SignsPlain(Player):
    """Says that it was not asked for portable draws."""

    def signs(self, sampling: SamplingParams) -> SamplingParams:
        return SAMPLING


def test_a_node_that_was_leased_portable_draws_may_not_sign_others():
    model = Model()
    arena = Arena([*(Player(i, model) for i in range(3)), SignsPlain(3, model)])
    arena.play(1)
    assert arena.verdicts == [None, None, None, Reason.WRONG_WORK]


@pytest.mark.parametrize("player", [Player, SignsPlain])
def test_a_lease_that_the_book_kept_may_be_signed_either_way(tmp_path, player):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = book.restore(Settings(silent_s=math.inf), head(3), 0.0)
    arena = Arena([player(0, Model())], ledger=ledger)
    lease = arena.lease(next(iter(arena.players)))
    assert lease.portable
    book.write(ledger.take_facts())
    arena.ledger = book.restore(Settings(silent_s=math.inf), head(3), 1.0)
    arena.ledger.member_up(lease.node)
    assert arena.ledger.leases[lease.id].portable is None
    arena.submit(lease)
    assert arena.verdicts == [None]


# ------------------------------------------------------------ what survives a restart


@pytest.mark.slow
@pytest.mark.long
def test_evidence_numbers_and_the_secret_survive_a_restart(tmp_path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = book.restore(Settings(silent_s=math.inf), head(3), 0.0)
    model = Model()
    players = [*(Player(i, model) for i in range(6)), Cold(6, model)]
    arena = Arena(players, ledger=ledger)
    arena.ledger.take_facts = list  # kept for the book
    arena.play(420)
    facts, ledger.transitions.facts = ledger.transitions.facts, []
    book.write(facts)
    record = ledger.quarantine.verifier.record(players[-1].node)
    assert record.kinds
    again = book.restore(Settings(silent_s=math.inf), head(3), 0.0)
    verifier = again.quarantine.verifier
    kept = verifier.record(players[-1].node)
    assert (kept.checks, kept.tokens) == (record.checks, record.tokens)
    assert record.samples - 150 < kept.samples <= record.samples, "as of its last check"
    assert kept.log == pytest.approx(record.log)
    assert kept.of(Kind.DRAWN).log == pytest.approx(record.of(Kind.DRAWN).log)
    assert len(verifier.nulls) == len(ledger.quarantine.verifier.nulls)
    assert verifier.commitment == ledger.quarantine.verifier.commitment, "the nonce is the same"
    other = Book(tmp_path / "other.sqlite").restore(Settings(), head(3), 0.0)
    assert other.quarantine.verifier.commitment != verifier.commitment
    again.members.update(arena.ledger.members)
    again.quarantine.quarantine(players[-1].node, "a test", None, 1.0)
    again.quarantine.release(players[-1].node, "looked at it")
    book.write(again.take_facts())
    released = book.restore(Settings(), head(3), 0.0).quarantine.verifier.record(players[-1].node)
    assert (released.samples, released.kinds) == (0, {}), "after a release it begins anew"


def test_a_record_of_another_release_begins_anew_and_the_seed_starts(tmp_path):
    book = Book(tmp_path / "ledger.sqlite")
    book._db.execute("insert into evidence values (?, ?)", (b"a" * 32, b"\xc1"))
    assert book.restore(Settings(), head(3), 0.0).quarantine.verifier.records == {}


def test_the_nonce_of_a_version_is_published_before_and_opened_after_it():
    ledger = Ledger(Settings(), head(3), bytes(range(32)))
    verifier = ledger.quarantine.verifier
    published = verifier.next_commitment
    ledger.advance(head(4))
    assert verifier.commitment == published
    ledger.advance(head(5))
    assert commitment(verifier.opened) == published
    fresh = Ledger(Settings(), head(0), bytes(range(32))).quarantine.verifier
    assert fresh.opened == b""


@pytest.mark.parametrize(("moved", "convicted"), [(1, 1), (2, 2), (4, 0)])
def test_half_of_a_class_that_moves_together_is_not_convicted(moved, convicted):
    """Honest numbers drift beyond what was learned: nobody is harmed, and it is learned anew."""
    model = Model()
    players = [Player(i, model) for i in range(7)]
    arena = Arena(players)
    arena.play(1)
    verifier, null = arena.verifier, Null(0.0, 1.0, 0.1)
    for player in players[:moved]:
        for checker in range(8):
            for _ in range(9):
                verifier.record(player.node).add(Kind.STALE, bytes([checker]), null, 1.0)
        assert verifier.record(player.node).proven
        verifier._changed.add(player.node)
    arena.ledger.tick(arena.now)
    assert sum(arena.penalty(player) is not None for player in players) == convicted
    assert bool(verifier.drifts) == (convicted == 0)
    if not convicted:
        assert all(verifier.record(player.node).log == 0.0 for player in players)


def test_a_panel_follows_the_nodes_as_they_are():
    model = Model()
    players = [Player(i, model) for i in range(6)]
    arena = Arena(players)
    arena.play(1)
    verifier, author = arena.verifier, players[0].node

    def panel() -> set[bytes]:
        return set(verifier.panel(author, arena.sampling).nodes)

    assert panel() == {player.node for player in players[1:]}
    arena.ledger.member_lost(players[1].node, arena.now)
    arena.ledger.quarantine.quarantine(players[2].node, "a test", None, arena.now)
    assert panel() == {player.node for player in players[3:]}
    arena.ledger.quarantine.release(players[2].node, "")
    assert players[2].node in panel()
    newer = Player(9, model)
    arena.ledger.member_up(newer.node)
    assert newer.node not in panel(), "it has not said what it can do"


def test_a_short_sample_needs_a_larger_difference_to_be_false_at_once():
    def off_by(nats: float) -> type[Player]:
        class Off(Player):
            def draw(self, sampling, stream):
                tokens, claims = self.draws(sampling, stream)
                return tokens[:1], [claims[0] - nats]

        return Off

    for nats, found in ((0.3, False), (1.0, True)):
        model = Model()
        players = [Player(i, model) for i in range(4)]
        cheat = off_by(nats)(5, model)
        arena = Arena([*players, cheat], sampling=msgspec.structs.replace(SAMPLING, max_tokens=1))
        assert arena.play(5, until=cheat) is found
