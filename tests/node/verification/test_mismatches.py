"""Mismatches of replays: what they say, how soon they convict, and what liars can do about it."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.verification.classes import ArithmeticClass
from node.verification.evidence import THRESHOLD, dropped
from node.verification.mismatches import CLASSES, MOST_STARTS, SUBJECTS, Counts, Tally, evidence, replay_context
from node.verification.opinions import Kind, Opinion
from node.verification.record import NodeRecord
from node.verification.replays import is_alike, weigh

NEEDED = THRESHOLD + math.log(len(Kind))
"""Evidence of one kind that convicts, if no other kind has any."""
CLASS = ArithmeticClass("transformers", "5.0", "cpu-avx512-00", "bfloat16", "sdpa")


def tally(numbers) -> Tally:
    starts = [i + 1 for i, mismatch in enumerate(numbers) if mismatch]
    return Tally(b"c", 0, len(numbers), starts[-MOST_STARTS:])


# ------------------------------------------------------------ one sample


def opinion(value: float, margin: float = 0.0) -> Opinion:
    return Opinion.of(2, np.float32([value, -1.0]), (), [margin, 0.0])


TRUE, FALSE, LOST = opinion(-0.5), opinion(-0.25), opinion(-0.5, 1e-6)
CLAIMED = np.float32([-0.5, -1.0])


def test_alike_is_every_bit_of_a_float32_and_every_draw_won():
    assert is_alike(CLAIMED, TRUE)
    assert is_alike([-0.0, -1.0], opinion(0.0)), "minus nothing is nothing"
    assert not is_alike(np.nextafter(CLAIMED, np.float32(0)), TRUE)
    assert not is_alike(CLAIMED, LOST)
    assert is_alike(CLAIMED, Opinion.of(2, CLAIMED)), "no margins where there is no noise"


@pytest.mark.parametrize(
    ("found", "panel", "author", "checkers"),
    [
        ([TRUE], 8, False, []),
        ([FALSE], 8, None, []),
        ([TRUE] * 3, 8, False, [False] * 3),
        ([TRUE] * 2 + [FALSE], 3, None, [None] * 3),
        ([FALSE] * 3, 3, True, [False] * 3),
        ([LOST] * 3, 3, True, [False] * 3),
        ([FALSE] * 4 + [TRUE] * 4, 8, None, [None] * 8),
        ([FALSE] * 3 + [TRUE] * 5, 8, False, [True] * 3 + [False] * 5),
        ([FALSE] * 5 + [TRUE] * 3, 8, True, [False] * 5 + [True] * 3),
        ([TRUE] * 3 + [FALSE], 8, None, [None] * 4),
    ],
)
def test_a_sample_is_decided_by_more_than_may_lie(found, panel, author, checkers):
    weighed = weigh(CLAIMED, {bytes([i]): one for i, one in enumerate(found)}, panel)
    assert (weighed.author, list(weighed.checkers.values())) == (author, checkers)


@given(st.integers(3, 8), st.data())
def test_liars_alone_never_make_a_mismatch_of_an_honest_node(panel, data):
    """Any liars say anything or nothing, and any honest node may be lost."""
    lies = st.sampled_from([FALSE, LOST, opinion(-3.0), TRUE, None])
    said = [data.draw(lies) for _ in range(dropped(panel))]
    heard = [TRUE if data.draw(st.booleans()) else None for _ in range(panel - len(said))]
    order = data.draw(st.permutations(range(panel)))
    found = {bytes([i]): (said + heard)[i] for i in order}
    opinions = {checker: one for checker, one in found.items() if one is not None}
    if not opinions:
        return
    weighed = weigh(CLAIMED, opinions, panel)
    assert weighed.author is not True
    honest = [bytes([i]) for i in range(len(said), panel)]
    assert not any(weighed.checkers.get(checker) for checker in honest)


# ------------------------------------------------------------ many samples


@pytest.mark.parametrize(("history", "samples"), [(64, 10), (384, 4), (2_048, 3), (16_384, 2)])
def test_a_cheat_whose_samples_always_mismatch_is_convicted_within_a_few(history, samples):
    assert evidence(tally([1] * samples), 0, history) >= NEEDED
    assert evidence(tally([1] * (samples - 1)), 0, history) < NEEDED


@pytest.mark.parametrize(("history", "samples"), [(384, 21), (2_048, 14)])
def test_six_mismatches_in_ten_are_enough(history, samples):
    """Samples of 35 tokens: 14 have 490."""
    rng, found = np.random.default_rng(5), 0
    for _ in range(1000):
        numbers = rng.random(samples) < 0.6
        ends = [i + 1 for i in range(samples) if numbers[i]]
        found += any(evidence(tally(numbers[:end]), 0, history) >= NEEDED for end in ends)
    assert found >= 990


@pytest.mark.parametrize(("honest", "history", "mismatches"), [(300, 2_048, 5), (1_000, 16_384, 4)])
def test_a_node_that_was_honest_for_long_is_convicted_soon_after(honest, history, mismatches):
    assert evidence(tally([0] * honest + [1] * mismatches), 0, history) >= NEEDED
    assert evidence(tally([0] * honest + [1] * (mismatches - 1)), 0, history) < NEEDED


def test_without_others_there_is_no_evidence_and_mismatches_of_others_lower_it():
    many = tally([1] * 50)
    assert evidence(many, 0, 0) <= 0.0
    assert evidence(many, 20, 20) <= 0.0
    by_others = [evidence(tally([1] * 4), others, 2_048) for others in (0, 1, 4, 40, 400)]
    assert by_others == sorted(by_others, reverse=True)
    assert by_others[1] > NEEDED > by_others[3], "one accident of somebody else does not save it"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=80), st.integers(0, 50), st.integers(0, 5000))
@example([True] * 80, 0, 5000)
def test_one_mismatch_more_never_lowers_the_evidence_and_one_of_the_others_never_raises_it(numbers, ones, zeros):
    now = evidence(tally(numbers), ones, ones + zeros)
    assert evidence(tally([*numbers, True]), ones, ones + zeros) >= evidence(
        tally([*numbers, False]), ones, ones + zeros
    )
    assert evidence(tally(numbers), ones + 1, ones + 1 + zeros) <= now + 1e-9


def _mean(rate: float, others_rate: float, numbers: int, others: int) -> float:
    """The exact mean of exp(evidence) over all outcomes, with the others' numbers first."""
    total = 0.0
    for found in range(others + 1):
        likely = math.comb(others, found) * others_rate**found * (1 - others_rate) ** (others - found)
        for way in range(1 << numbers):
            own = [bool(way >> i & 1) for i in range(numbers)]
            chance = rate ** sum(own) * (1 - rate) ** (numbers - sum(own))
            total += likely * chance * math.exp(evidence(tally(own), found, others))
    return total


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.2])
def test_the_evidence_of_an_honest_node_has_a_mean_of_at_most_one(rate):
    assert _mean(rate, rate, 5, 12) <= 1.0
    assert _mean(rate, rate / 2, 5, 12) <= 1.0, "half of the others have no mismatches at all"


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.05])
def test_the_bound_holds_at_small_evidence(rate):
    """1,000 honest lives of 60 samples among 7 others with as many each, of which three are never unlike: one in
    twenty ever gets to 20 at most."""
    rng, reached, most = np.random.default_rng(6), 0, 0.0
    for _ in range(1000):
        own = rng.random(60) < rate
        others = np.cumsum(rng.binomial(4, rate, 60))
        ends = [i for i in range(60) if own[i]]
        best = max((evidence(tally(own[: i + 1]), int(others[i]), 7 * (i + 1)) for i in ends), default=0.0)
        reached, most = reached + (best >= math.log(20)), max(most, best)
    assert reached <= 50
    assert most < THRESHOLD


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("rate", "lives"), [(0.003, 1_000_000), (0.02, 100_000)])
def test_a_million_honest_lives(rate, lives):
    """200 samples each among 7 others with 200 each, of which three are never unlike."""
    rng, most = np.random.default_rng(7), 0.0
    for _ in range(lives):
        own = np.flatnonzero(rng.random(200) < rate)
        if len(own) < 2:  # one mismatch is never enough
            continue
        others = np.cumsum(rng.binomial(4, rate, 200))
        starts = (own + 1).tolist()
        for i, end in enumerate(starts[1:], 2):
            most = max(most, evidence(Tally(b"c", 0, end, starts[:i]), int(others[end - 1]), 7 * end))
    assert most < THRESHOLD, most


# ------------------------------------------------------------ what is kept


def test_a_node_that_changes_its_class_begins_anew_at_a_price():
    one = Tally()
    for _ in range(3):
        one.add(b"a", mismatch=True, others=(0, 2_048))
    before = one.log
    one.add(b"b", mismatch=True, others=(0, 2_048))
    assert (one.changes, one.numbers, one.starts) == (1, 1, [1])
    for _ in range(2):
        one.add(b"b", mismatch=True, others=(0, 2_048))
    assert 0 < before - one.log == pytest.approx(math.log(0.9 / 0.05))
    for _ in range(MOST_STARTS + 10):
        one.add(b"b", mismatch=True, others=(0, 2_048))
    assert len(one.starts) == MOST_STARTS


def test_counts_of_others_leave_out_the_node_and_the_convicted():
    counts = Counts()
    for node, ones, numbers in ((b"a", 3, 10), (b"b", 1, 20), (b"c", 0, 30)):
        counts.add(b"k", node, ones, numbers)
    assert counts.others(b"k", b"a") == (1, 50)
    assert counts.others(b"k", b"stranger") == (4, 60)
    assert counts.others(b"other", b"a") == (0, 0)
    counts.forget(b"b")
    assert counts.others(b"k", b"a") == (0, 30)


def test_counts_are_bounded_and_lose_nothing_of_a_class():
    counts = Counts()
    for i in range(SUBJECTS + 50):
        counts.add(b"k", i.to_bytes(4, "little"), 1, 2)
    assert counts.others(b"k", b"x") == (SUBJECTS + 50, 2 * (SUBJECTS + 50))
    assert len(counts._classes[b"k"].nodes) <= SUBJECTS + 1
    for i in range(CLASSES + 5):
        counts.add(i.to_bytes(4, "little"), b"a", 0)
    assert len(counts) == CLASSES


def test_a_record_with_tallies_survives_a_file():
    record = NodeRecord(samples=9)
    context = replay_context(Kind.UNLIKE, CLASS)
    assert context != replay_context(Kind.APART, CLASS)
    for _ in range(3):
        assert not record.proven
        record.count(Kind.UNLIKE, context, mismatch=True, others=(0, 2_048))
    assert record.proven
    assert record.worst is Kind.UNLIKE
    assert record.suspicious(math.log(20.0))
    kept = NodeRecord.from_bytes(record.to_bytes())
    assert (kept.log, kept.tallies, kept.proven) == (record.log, record.tallies, True)
    with pytest.raises(ValueError, match="record"):
        NodeRecord.from_bytes(record.to_bytes()[:-1])
