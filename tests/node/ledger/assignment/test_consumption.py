"""How many samples may be begun for a trainer, given how fast it takes groups: with numbers in place of a clock, and in
the ledger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_kit import ALICE, PROMPT, SAMPLING, ask, check_places, draw, group_id, head, ledger_at, submit

from node.ledger.assignment.consumption import Consumption
from node.ledger.messages import Reason


def after_one_step(step: int = 64, *, waited_s: float = 0.0, max_lag: int = 1) -> Consumption:
    """A trainer that has just begun a step of 10 s, and took `step` samples in the step before."""
    use = Consumption(max_lag, 0.0, 0.0)
    use.give(8, 0.0)
    use.seal(10.0)
    use.take(step - 8, 8, 10.0)
    if waited_s:
        use.take(8, 0, 10.0)
        use.give(8, 10.0 + waited_s)
    else:
        use.take(8, 8, 15.0)
    use.seal(20.0)
    return use


def test_a_waiting_trainer_is_not_limited_before_its_first_step():
    use = Consumption(1, 0.0, 0.0)
    assert use.most_begun(1, 100) is None
    assert use.most_open() is None
    use.give(8, 5.0)
    assert use.most_begun(1, 100) == 100, "after it has stopped waiting: as many as the nodes hold at once"
    use.take(120, 8, 6.0)
    assert use.most_begun(1, 100) == 128, "as many as it has used"


def test_a_trainer_that_never_waits_gets_one_step_ahead():
    use = after_one_step()
    assert (use.step, use.hurry) == (64, 0)
    assert use.most_begun(1, 1000) == 64
    assert use.most_begun(0, 1000) == 0, "a node that is a version behind gets none"
    assert use.most_begun(2, 1000) == 64, "no more if more lag is allowed"


def test_a_trainer_that_waits_gets_all_that_it_can_still_use():
    use = after_one_step(waited_s=5.0)
    assert use.hurry == 1
    assert use.most_begun(1, 1000) == 128, "the rest of this step, and the next step"
    assert use.most_begun(0, 1000) == 64
    use.take(40, 8, 21.0)
    assert use.most_begun(0, 1000) == 24


def test_a_trainer_that_waits_for_more_than_usual_gets_more():
    use = after_one_step()
    use.take(8 + 64, 0, 21.0)  # it had the first 8 already when the step began
    assert use.hurry == 1
    assert use.most_begun(0, 1000) == 32
    use.give(8, 25.0)
    assert use.most_begun(0, 1000) == 0


def test_without_lag_only_the_rest_of_the_step_is_begun():
    use = after_one_step(max_lag=0)
    assert use.most_begun(0, 1000) == 64
    use.take(64, 8, 21.0)
    assert use.most_begun(0, 1000) == 0


def test_a_trainer_that_publishes_several_times_a_batch_still_gets_its_batch_at_once():
    use = after_one_step()
    now = 20.0
    for _ in range(6):  # it takes 64 samples per four versions
        use.take(64, 0, now)
        for _ in range(4):
            now += 10.0
            use.seal(now)
        assert use.step is not None
        assert use.step < 8
        assert use.waits_since is not None
        assert (use.most_begun(0, 1000) or 0) >= 60, "all that it waits for, not one group after another"
        assert (use.most_open() or 0) >= 90
        use.give(64, now)
    assert (use.most_begun(0, 1000) or 0) < 8, "while it does not wait, its mean counts"


events = st.lists(
    st.tuples(st.sampled_from(["take", "give", "seal"]), st.integers(1, 64), st.floats(0.0, 30.0)), max_size=60
)


@given(events, st.integers(0, 3))
def test_a_trainer_that_waits_always_gets_something_at_the_newest_version(events, max_lag):
    use, now, left = Consumption(max_lag, 0.0, 0.0), 0.0, 0
    for what, samples, seconds in events:
        now += seconds
        if what == "give":
            left += samples
            use.give(samples, now)
        elif what == "take" and left:
            samples = min(samples, left)
            left -= samples
            use.take(samples, left, now)
        elif what == "seal":
            use.seal(now)
        assert (use.waits_since is not None) == (left == 0)
        assert 0 <= use.hurry <= 1
        assert 0 <= use.waiting <= 1
        most = use.most_begun(max_lag, 0)
        if not left:
            assert most is None or most > 0, "otherwise it would wait for ever"
        assert most is None or most <= (max(use.step, use.gather) if use.step else 64 * 60) * (max_lag + 2) + 1


def drawn_for(ledger, steps: int, groups: int, n: int) -> int:
    """Let one node with room for 64 samples work for a trainer that takes `groups` groups after each seal. Returns the
    samples generated."""
    drawn = offered = 0
    hand = None
    for step in range(steps):
        now = 10.0 * step
        taken = 0
        while True:
            for _ in range(ledger.room("s", n)):
                ledger.offer(group_id(offered), "s", PROMPT, n, SAMPLING)
                offered += 1
            if taken < groups and hand is not None:
                ledger.taken(hand.id, now)
                hand = None
            if taken < groups and (hand := ledger.hand_over("s")) is not None:
                taken += 1
                continue
            version = ledger.head.version
            found = ledger.request_work(ALICE, ask(64, version), now)
            if isinstance(found, Reason):
                assert taken == groups
                break
            for lease in found:
                for sample in lease.samples:
                    assert submit(ledger, lease, draw(lease, sample, version), now + 1.0) is None
                    drawn += 1
            check_places(ledger)
        ledger.advance(head(ledger.head.version + 1), now + 10.0)
    return drawn


@pytest.mark.parametrize(("groups", "n"), [(1, 4), (2, 4), (8, 4), (3, 8)])
def test_a_node_of_any_speed_generates_only_what_is_used(groups, n):
    """Without the limit the node generates all that it can hold in every step, and most of it is too old two steps
    later."""
    wasteful = ledger_at(3, groups=0)
    assert drawn_for(wasteful, 20, groups, n) > 1.4 * 20 * groups * n
    ledger = ledger_at(3, groups=0)
    ledger.track_consumption("s", 1, 0.0)
    drawn = drawn_for(ledger, 20, groups, n)
    held = 2 * 64 + 16 * n  # before the first step was observed
    assert drawn <= 20 * groups * n + held
    assert ledger.nodes[ALICE].unused.total() <= held
