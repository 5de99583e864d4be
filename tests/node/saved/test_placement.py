"""Which node is to hold which fragment: by events and a virtual clock."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from node.saved.placement import AGAIN_S, REFUSED_S, Assignment, Placement, order_of

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"ABCDE")


def placed(placement: Placement, now: float = 0.0) -> dict[int, bytes]:
    """Place what can be placed, without failures."""
    while (assignment := placement.next(now)) is not None:
        placement.placed(assignment)
    return placement.holders


def test_each_fragment_goes_to_a_node_of_its_own() -> None:
    placement = Placement(4)
    placement.note_members([A, B, C, D, E])
    assert placed(placement) == {0: A, 1: B, 2: C, 3: D}
    assert placement.is_whole


def test_a_lost_holders_fragment_goes_to_another_node() -> None:
    placement = Placement(3)
    placement.note_members([A, B, C])
    placed(placement)
    placement.note_members([A, C, D])
    assert not placement.is_whole
    assert placed(placement) == {0: A, 1: D, 2: C}


def test_a_node_that_failed_is_tried_again_before_another_gets_two() -> None:
    placement = Placement(2)
    placement.note_members([A, B])
    first, second = placement.next(0.0), placement.next(0.0)
    assert first is not None
    assert second is not None
    placement.placed(first)
    placement.failed(second, 0.0, refused=False)
    assert placement.next(1.0) is None
    assert placement.next(AGAIN_S) == second


def test_when_all_others_refuse_a_node_gets_two() -> None:
    placement = Placement(2)
    placement.note_members([A, B])
    first, second = placement.next(0.0), placement.next(0.0)
    assert first is not None
    assert second is not None
    placement.placed(first)
    placement.failed(second, 0.0, refused=True)
    assert placement.next(1.0) == Assignment(1, A)


def test_a_node_that_refused_is_asked_again_later() -> None:
    placement = Placement(1)
    placement.note_members([A])
    first = placement.next(0.0)
    assert first is not None
    placement.failed(first, 0.0, refused=True)
    assert placement.next(REFUSED_S - 1) is None
    assert placement.next(REFUSED_S) == first


def test_a_node_that_lost_its_fragment_says_so() -> None:
    placement = Placement(2)
    placement.note_members([A, B])
    placed(placement)
    placement.note_held(A, [])
    assert placement.holders == {1: B}
    placement.note_held(A, [0])
    assert placement.holders == {0: A, 1: B}


def test_a_node_is_believed_only_what_was_placed_with_it() -> None:
    placement = Placement(2)
    placement.note_members([A, B, C])
    placed(placement)
    placement.note_members([B, C])
    placement.note_held(B, [0, 1, 7])
    placement.note_held(C, [0, 1])
    assert placement.holders == {1: B}
    assert placed(placement) == {0: C, 1: B}
    after = Placement(2, placement.given)
    after.note_members([A, B, C])
    after.note_held(C, [0, 1])
    after.note_held(A, [0, 1])
    after.note_held(B, [1])
    assert after.holders == {0: C, 1: B}, "of a fragment that was placed with two, the first counts that says so"


def test_it_is_stuck_while_all_nodes_refuse() -> None:
    placement = Placement(2)
    placement.note_members([A, B])
    first, second = placement.next(0.0), placement.next(0.0)
    assert first is not None
    assert second is not None
    placement.failed(first, 0.0, refused=True)
    assert not placement.is_stuck(0.0), "the other one is on its way"
    placement.interrupted(second)
    assert not placement.is_stuck(0.0), "it may be tried again"
    placement.failed(second, 0.0, refused=True)
    assert placement.is_stuck(0.0)
    assert not placement.is_stuck(REFUSED_S)


def test_the_order_has_those_first_that_can_be_dialed() -> None:
    order = order_of(b"s" * 32, [(A, False), (B, True), (C, True)])
    assert order[2] == A
    assert order == order_of(b"s" * 32, [(C, True), (A, False), (B, True)])


class Churn(RuleBasedStateMachine):
    """Nodes come, go, fail and refuse; what is held is always held by members, and calm always ends whole."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement(4)
        self.members: list[bytes] = []
        self.coming: list[Assignment] = []
        self.now = 0.0

    @rule(number=st.integers(0, 7))
    def come_or_go(self, number: int) -> None:
        peer = bytes([number]) * 32
        self.members = [m for m in self.members if m != peer] if peer in self.members else [*self.members, peer]
        self.placement.note_members(self.members)

    @rule(seconds=st.floats(0, 2 * REFUSED_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begin(self) -> None:
        if (assignment := self.placement.next(self.now)) is not None:
            assert assignment.peer in self.members
            assert assignment.fragment not in self.placement.holders
            assert assignment.fragment not in {other.fragment for other in self.coming}
            self.coming.append(assignment)

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), end=st.sampled_from(["placed", "failed", "refused", "interrupted"]))
    def finish(self, data: st.DataObject, end: str) -> None:
        assignment = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        if end == "placed":
            self.placement.placed(assignment)
        elif end == "interrupted":
            self.placement.interrupted(assignment)
        else:
            self.placement.failed(assignment, self.now, refused=end == "refused")

    @invariant()
    def holders_are_members(self) -> None:
        assert set(self.placement.holders.values()) <= set(self.members)

    def teardown(self) -> None:
        for assignment in self.coming:
            self.placement.placed(assignment)
        self.now += 2 * REFUSED_S
        placed(self.placement, self.now)
        assert self.placement.is_whole == bool(self.members)
        if len(self.members) >= 4 and not self.coming:
            assert len(self.placement.holders) == 4


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=80, stateful_step_count=40)
