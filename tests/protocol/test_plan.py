"""The planner's properties, and rosters that are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_kit import AUTHORITY as KEY
from protocol_kit import SWARM, key_of, member, roster

from codec.errors import PeerError
from swarm.protocol.plan import AUTHORITY, Member, Roster, open_roster, plan

PEERS = {slot: key_of(slot).public for slot in range(200)}


@st.composite
def swarms(draw: st.DrawFn, most: int = 40) -> list[Member]:
    slots = draw(st.sets(st.integers(0, 199), min_size=1, max_size=most))
    return [
        member(
            slot,
            peer=PEERS[slot],
            up_mbit=draw(st.sampled_from([0.0, 1.0, 25.0, 100.0, 100.0, 200.0, 1000.0])),
            leaf=draw(st.integers(0, 4)) == 0,
            dialable=draw(st.integers(0, 3)) > 0,
        )
        for slot in sorted(slots)
    ]


STRIPES = st.integers(1, 12)


def as_roster(members: list[Member], stripes: int) -> Roster:
    return open_roster(roster(plan(members, stripes), members), SWARM)


def relays(members: list[Member]) -> list[Member]:
    return [m for m in members if not m.leaf and m.up_mbit > 0]


@given(swarms(), STRIPES)
def test_every_tree_reaches_everyone_without_a_cycle(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)  # refuses anything else
    assert plan_.stripes == stripes
    for stripe in range(stripes):
        for m in members:
            line = plan_.ancestors(stripe, m.slot)
            assert len(set(line)) == len(line) <= len(members)
            assert m.slot not in line


@given(swarms(), STRIPES, st.randoms(use_true_random=False))
def test_the_order_of_the_members_is_of_no_account(members: list[Member], stripes: int, rng) -> None:
    shuffled = list(members)
    rng.shuffle(shuffled)
    assert plan(shuffled, stripes) == plan(members, stripes)


@given(swarms(), STRIPES)
def test_the_trainer_feeds_one_head_a_stripe(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)
    for stripe in range(stripes):
        assert len(plan_.heads(stripe)) == (1 if relays(members) else len(members))


@given(swarms(), STRIPES)
def test_leaves_stay_leaves(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)
    may = {m.slot for m in relays(members)}
    for stripe in range(stripes):
        assert {p for p in plan_.parents[stripe] if p != AUTHORITY} <= may


@given(swarms(), STRIPES)
def test_nobody_stands_inside_two_trees_when_there_are_enough(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)
    inside = [{p for p in parents if p != AUTHORITY} for parents in plan_.parents]
    if len(relays(members)) > stripes:
        assert sum(len(i) for i in inside) == len(set().union(*inside))
    else:  # a relay with most of the uplink may head several
        assert all(len(i) <= 1 for i in inside)


@given(swarms(), STRIPES)
def test_fan_out_follows_uplink(members: list[Member], stripes: int) -> None:
    """Inside a stripe a node has at most its share of the children, rounded up."""
    plan_ = as_roster(members, stripes)
    uplink = {m.slot: m.up_mbit for m in members}
    for stripe in range(stripes):
        inside = [s for s in plan_._kids[stripe] if s != AUTHORITY]
        # Interior nodes that got no child have the smallest uplinks, so leaving them out only enlarges shares.
        total = sum(uplink[s] for s in inside)
        for slot in inside:
            assert len(plan_.children(stripe, slot)) <= math.ceil((len(members) - 1) * uplink[slot] / total)


def test_no_node_gets_what_rounding_left_over() -> None:
    """1,000 equal nodes in 8 stripes: 125 givers with 999 children are 7 or 8 each, not 7 and one with 131."""
    members = [Member(s, s.to_bytes(32, "little"), (), True, "", "", 100.0, False) for s in range(1000)]
    for parents in plan(members, 8):
        kids = [parents.count(s) for s in set(parents) - {AUTHORITY}]
        assert set(kids) <= {7, 8}


def test_load_over_all_stripes_is_in_proportion_to_uplink() -> None:
    members = [member(s, up_mbit=50.0 * (1 + s % 4), peer=s.to_bytes(32, "little")) for s in range(200)]
    sent = dict.fromkeys(range(200), 0)
    for parents in plan(members, 8):
        for parent in parents:
            if parent != AUTHORITY:
                sent[parent] += 1
    load = [sent[m.slot] / m.up_mbit for m in members]
    mean = sum(load) / len(load)
    assert max(load) < 1.5 * mean


def test_trees_are_flat() -> None:
    members = [member(s, peer=s.to_bytes(32, "little")) for s in range(200)]
    plan_ = Roster(SWARM, 1, 1, (), tuple(members), plan(members, 8))
    depth = max(len(plan_.ancestors(k, s)) for k in range(8) for s in range(200))
    assert depth <= 3


@given(swarms(), STRIPES)
def test_backups_never_hang_on_whom_they_are_for(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)
    for stripe in range(stripes):
        for m in members:
            backups = plan_.backups(stripe, m.slot)
            assert len(set(backups)) == len(backups)
            assert m.slot not in backups
            assert plan_.parent(stripe, m.slot) not in backups
            assert not any(m.slot in plan_.ancestors(stripe, b) for b in backups)
            assert AUTHORITY not in backups


@given(swarms(), st.data())
def test_backups_among_some_keep_their_order(members: list[Member], data: st.DataObject) -> None:
    plan_ = as_roster(members, 4)
    slots = [m.slot for m in members]
    some = data.draw(st.lists(st.sampled_from(slots), unique=True))
    slot = data.draw(st.sampled_from(slots))
    assert plan_.backups(2, slot, among=some) == [b for b in plan_.backups(2, slot) if b in some]
    assert plan_.backups(2, slot, among=[10_000]) == []


def test_orphans_of_one_parent_spread() -> None:
    members = [member(s, peer=s.to_bytes(32, "little")) for s in range(64)]
    plan_ = Roster(SWARM, 1, 1, (), tuple(members), plan(members, 8))
    head = plan_.heads(0)[0]
    first = [plan_.backups(0, orphan)[0] for orphan in plan_.children(0, head)]
    assert len(set(first)) > len(first) // 2


def test_nodes_that_cannot_be_dialed_hang_on_those_that_can() -> None:
    """Half of the nodes behind NAT, each giver in a tree of both kinds: few edges without an end that can be dialed."""
    members = [member(s, dialable=s % 2 == 0, peer=s.to_bytes(32, "little")) for s in range(64)]
    dead = total = 0
    for parents in plan(members, 8):
        for m, parent in zip(members, parents, strict=True):
            total += 1
            dead += parent != AUTHORITY and not m.dialable and not members[parent].dialable
    assert dead <= 0.05 * total


def test_an_empty_swarm_has_a_plan() -> None:
    assert plan([], 4) == ((), (), (), ())
    assert open_roster(roster(plan([], 4), []), SWARM).heads(0) == []


def test_lookups() -> None:
    members = [member(3), member(7), member(9)]
    plan_ = open_roster(roster([(7, AUTHORITY, 7), (AUTHORITY, 3, 3)], members), SWARM)
    assert plan_.member(7) == members[1]
    assert plan_.member(4) is None
    assert plan_.member_of(members[2].peer) == members[2]
    assert plan_.member_of(bytes(32)) is None
    assert plan_.children(0, 7) == [3, 9]
    assert plan_.children(1, 7) == []
    assert plan_.heads(1) == [3]
    assert plan_.parent(0, 3) == 7
    assert plan_.parent(0, 4) is None
    assert plan_.index_of(9) == 2


# ---------------------------------------------------------------- what is refused

TWO = [member(0), member(1)]


@pytest.mark.parametrize(
    ("parents", "members"),
    [
        pytest.param([(1, 0)], TWO, id="a cycle of two"),
        pytest.param([(0, AUTHORITY)], TWO, id="its own parent"),
        pytest.param([(AUTHORITY, 5)], TWO, id="a parent that is nobody"),
        pytest.param([(AUTHORITY, -2)], TWO, id="a parent below the authority"),
        pytest.param([(AUTHORITY, 0), (1, 0)], TWO, id="a cycle in the second tree"),
        pytest.param([(AUTHORITY,)], TWO, id="too few parents"),
        pytest.param([(AUTHORITY, 0, 0)], TWO, id="too many parents"),
        pytest.param([(AUTHORITY, 0)], [member(0), member(0, peer=key_of(1).public)], id="a slot twice"),
        pytest.param([(AUTHORITY, 0)], [member(0), member(1, peer=key_of(0).public)], id="a peer twice"),
        pytest.param([(AUTHORITY, 0)], [member(0), member(1, up_mbit=float("nan"))], id="an uplink that is no number"),
        pytest.param([(AUTHORITY, 0)] * 65, TWO, id="too many stripes"),
    ],
)
def test_refused(parents: list[tuple[int, ...]], members: list[Member]) -> None:
    with pytest.raises(PeerError, match="roster"):
        open_roster(roster(parents, members), SWARM)


def test_forged_truncated_or_of_another_swarm() -> None:
    good = roster([(AUTHORITY, 0)], TWO)
    assert open_roster(good, SWARM).serial == 1
    for bad in (roster([(AUTHORITY, 0)], TWO, key=key_of("mallory")), good[:-1], good + b"\0", b"", good[:64]):
        with pytest.raises(PeerError):
            open_roster(bad, SWARM)
    with pytest.raises(PeerError):
        open_roster(good, key_of("other").public)
    assert KEY.public == SWARM
