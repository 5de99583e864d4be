"""Which state is fetched, and which source gives which fragment."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from saved_kit import KEY, OTHER, coded

from node.saved.fetching import FetchPlan, newest_whole
from node.saved.messages import HeldState


def test_the_newest_whole_state_is_fetched(tmp_path: Path) -> None:
    old, new = coded(tmp_path, b"old"), coded(tmp_path, b"new", serial=2)
    said = [
        [HeldState(new.sealed, (0,)), HeldState(old.sealed, (0,))],
        [HeldState(old.sealed, (1,))],
        [HeldState(old.sealed, (1, 3))],
    ]
    found = newest_whole(said, KEY.public)
    assert found is not None
    assert found.record == old.record
    assert found.newest == new.record
    assert found.holders == {0: [0], 1: [1, 2], 3: [2]}
    found = newest_whole([*said, [HeldState(new.sealed, (2,))]], KEY.public)
    assert found is not None
    assert found.record == new.record
    assert newest_whole([said[0]], KEY.public) is None


def test_a_rolled_back_or_foreign_record_does_not_count(tmp_path: Path) -> None:
    old, new = coded(tmp_path, b"old"), coded(tmp_path, b"new", serial=2)
    foreign = coded(tmp_path, b"foreign", serial=9, key=OTHER)
    said = [
        [HeldState(old.sealed, (0, 1, 2, 3)), HeldState(foreign.sealed, (0, 1, 2, 3)), HeldState(b"x" * 99, (0,))],
        [HeldState(new.sealed, (0, 1)), HeldState(new.sealed[:-1] + b"x", (2, 3))],
    ]
    found = newest_whole(said, KEY.public)
    assert found is not None
    assert found.record == new.record
    assert newest_whole(said[:1], OTHER.public) is not None
    assert newest_whole([[HeldState(b"", (0,))]], KEY.public) is None


def test_what_is_here_already_is_fetched_first_and_then_the_content_itself() -> None:
    holders = {0: [3], 1: [2], 2: [1], 3: [0, 4]}
    assert FetchPlan(2, holders).first() == {3: 0, 2: 1}
    assert FetchPlan(2, holders, {3: 10, 2: 20}).first() == {1: 2, 0: 3}
    assert FetchPlan(3, {0: [0], 1: [0], 2: [0]}).first() == {0: 0}


def test_what_is_here_whole_is_fetched_from_nobody() -> None:
    holders = {0: [0], 1: [1], 2: [2]}
    plan = FetchPlan(2, holders, done=[1])
    assert plan.first() == {0: 0}
    assert plan.next(1) is None
    plan.lost(0)
    assert not plan.is_hopeless
    assert plan.next(2) == 2
    plan.fetched(2)
    assert plan.is_over
    assert FetchPlan(2, holders, done=[1, 3]).is_over, "whether a node says it has it, or not"
    assert FetchPlan(2, {0: [0]}, done=[0]).is_hopeless


def test_beside_a_slow_fragment_another_one_is_fetched() -> None:
    plan = FetchPlan(1, {0: [0], 1: [1]})
    assert plan.next(0) == 0
    assert plan.next(1) is None
    assert plan.next(1, slow=1) == 1
    plan.fetched(1)
    assert plan.is_over


def test_one_node_with_all_fragments_is_enough(tmp_path: Path) -> None:
    state = coded(tmp_path, b"content")
    found = newest_whole([[HeldState(state.sealed, (0, 1, 2, 3))]], KEY.public)
    assert found is not None
    plan = FetchPlan(state.record.needed, found.holders)
    assert plan.next(0) == 0
    plan.fetched(0)
    assert plan.next(0) == 1
    plan.fetched(1)
    assert plan.is_over


@given(
    data=st.data(),
    needed=st.integers(1, 6),
    holders=st.dictionaries(st.integers(0, 11), st.lists(st.integers(0, 7), min_size=1, max_size=3), max_size=12),
)
def test_as_long_as_there_are_enough_the_plan_ends_whole(
    data: st.DataObject, needed: int, holders: dict[int, list[int]]
) -> None:
    """Sources are lost at any moment; what is fetched is never fetched again, and no fragment by two at a time."""
    plan, lost = FetchPlan(needed, holders), set[int]()
    coming = plan.first()
    for _ in range(200):
        if plan.is_over or plan.is_hopeless:
            break
        for source in sorted(set(range(8)) - lost - set(coming)):
            if (fragment := plan.next(source)) is not None:
                assert fragment not in plan.done
                assert fragment not in coming.values()
                assert source in holders[fragment]
                coming[source] = fragment
        assert coming, "somebody fetches"
        source = data.draw(st.sampled_from(sorted(coming)))
        fragment = coming.pop(source)
        if data.draw(st.booleans()):
            plan.fetched(fragment)
        else:
            plan.lost(source)
            lost.add(source)
    left = {fragment for fragment, sources in holders.items() if set(sources) - lost}
    assert plan.is_over != plan.is_hopeless
    assert plan.is_over == (len(plan.done) >= needed)
    assert plan.is_hopeless == (len(left | plan.done) < needed)
