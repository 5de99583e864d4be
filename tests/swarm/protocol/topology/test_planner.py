"""Properties of plans: trees with one root child each, leaves, loads, regions, balance, and few moves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner_kit import PEERS, STRIPES, as_roster, child_counts, plan, relays, roster_of, swarms
from protocol_kit import member

from swarm.protocol.membership.roster import AUTHORITY, Member
from swarm.protocol.topology.planner import EXTRA_MOVES, Planner


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
def test_the_order_of_the_members_does_not_matter(members: list[Member], stripes: int, rng) -> None:
    shuffled = list(members)
    rng.shuffle(shuffled)
    assert plan(shuffled, stripes) == plan(members, stripes)


@given(swarms(), STRIPES)
def test_the_trainer_has_one_root_child_a_stripe(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)
    for stripe in range(stripes):
        assert len(plan_.root_children(stripe)) == (1 if relays(members) else len(members))


@given(swarms(), STRIPES)
def test_leaves_stay_leaves(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)
    may = {m.slot for m in relays(members)}
    for stripe in range(stripes):
        assert {p for p in plan_.parents[stripe] if p != AUTHORITY} <= may


def equal_members(count: int, *, up_mbit: float = 100.0, regions: int = 1, leaf: bool = False) -> list[Member]:
    return [
        member(
            s, up_mbit=up_mbit, region=f"r{s % regions}" if regions > 1 else "", leaf=leaf, peer=s.to_bytes(32, "big")
        )
        for s in range(count)
    ]


def mixed_members(count: int, regions: int = 1, seed: int = 0) -> list[Member]:
    """Members with uplinks as on the internet: lognormal, median 200 Mbit/s."""
    rng = random.Random(seed)
    return [
        member(
            s, up_mbit=200 * rng.lognormvariate(0, 0.5), region=f"r{rng.randrange(regions)}", peer=s.to_bytes(32, "big")
        )
        for s in range(count)
    ]


def depth_of(members: list[Member], parents: tuple[tuple[int, ...], ...]) -> int:
    deepest = 0
    for row in parents:
        parent = {m.slot: p for m, p in zip(members, row, strict=True)}
        for m in members:
            at, depth = m.slot, 0
            while at != AUTHORITY:
                at, depth = parent[at], depth + 1
                assert depth <= len(members), "a cycle"
            deepest = max(deepest, depth)
    return deepest


def worst_load(members: list[Member], parents: tuple[tuple[int, ...], ...]) -> float:
    """The highest load of a node, as a multiple of the mean."""
    count = child_counts(members, parents)
    uplink = {m.slot: m.up_mbit for m in members if not m.leaf}
    mean = len(parents) * (len(members) - 1) / sum(uplink.values())
    return max(n / uplink[slot] / mean for slot, n in count.items() if n)


def crossings(members: list[Member], parents: tuple[tuple[int, ...], ...]) -> list[int]:
    """The number of edges between regions, by stripe."""
    region = {m.slot: m.region for m in members}
    return [sum(p != AUTHORITY and region[p] != m.region for m, p in zip(members, row, strict=True)) for row in parents]


# ---------------------------------------------------------------- from nothing


@pytest.mark.parametrize("regions", [1, 4])
def test_with_enough_nodes_none_is_interior_in_two_trees(regions: int) -> None:
    members = mixed_members(64 * regions, regions)
    inside = [set(row) - {AUTHORITY} for row in plan(members, 8)]
    assert sum(len(i) for i in inside) == len(set().union(*inside))


def test_four_equal_nodes_are_root_children_of_two_stripes_each() -> None:
    members = equal_members(4)
    parents = plan(members, 8)
    assert set(child_counts(members, parents).values()) == {6}
    assert depth_of(members, parents) == 2


def test_no_node_gets_the_whole_rounding_error() -> None:
    """1,000 equal nodes in 8 stripes: 125 givers with 999 children are 7 or 8 each, not 7 and one with 131."""
    members = [Member(s, s.to_bytes(32, "little"), (), True, "", "", 100.0, False) for s in range(1000)]
    for parents in plan(members, 8):
        kids = [parents.count(s) for s in set(parents) - {AUTHORITY}]
        assert set(kids) <= {7, 8}


@pytest.mark.parametrize("count", [4, 8, 64, 1000])
def test_load_follows_uplink(count: int) -> None:
    """No node is asked for much more than its part: the most uneven share is what headroom is left."""
    for seed in range(5):
        members = mixed_members(count, seed=seed)
        assert worst_load(members, plan(members, 8)) < 1.2


def test_load_follows_uplinks_that_differ_by_a_factor_of_sixteen() -> None:
    members = [member(s, up_mbit=u) for s, u in enumerate([400, 200, 200, 100, 100, 50, 50, 25])]
    assert worst_load(members, plan(members, 8)) < 1.1


def test_trees_are_flat() -> None:
    assert depth_of(equal_members(200), plan(equal_members(200), 8)) <= 4
    assert depth_of(mixed_members(1000, 6), plan(mixed_members(1000, 6), 8)) <= 7


@pytest.mark.parametrize("count", [8, 240])
def test_each_border_is_crossed_once_a_stripe(count: int) -> None:
    members = equal_members(count, regions=4)
    parents = plan(members, 8)
    assert crossings(members, parents) == [3] * 8
    region = {m.slot: m.region for m in members}
    for row in parents:
        entered = [region[m.slot] for m, p in zip(members, row, strict=True) if p == AUTHORITY or region[p] != m.region]
        assert sorted(entered) == ["r0", "r1", "r2", "r3"]
    assert worst_load(members, parents) < 1.2


def test_a_region_without_uplinks_is_fed_from_outside() -> None:
    members = [member(s, up_mbit=0.0 if s % 2 else 200.0, region=f"r{s % 2}") for s in range(16)]
    parents = plan(members, 8)
    assert crossings(members, parents) == [8] * 8
    assert worst_load([m for m in members if m.up_mbit] + [m for m in members if not m.up_mbit], parents) < 2.2


def test_root_children_are_in_the_trainers_region() -> None:
    members = equal_members(64, regions=2)
    parents = Planner(8, home="r1").update(members)
    heads = [m for row in parents for m, p in zip(members, row, strict=True) if p == AUTHORITY]
    assert sum(m.region == "r1" for m in heads) >= 4


@pytest.mark.parametrize(("count", "from_home"), [(240, 1), (2400, 3)])
def test_a_large_home_region_feeds_all_others_itself(count: int, from_home: int) -> None:
    """Then no chunk makes two long hops. A smaller home region has no uplink for that beside its own needs."""
    members = equal_members(count, regions=4)
    parents = Planner(8, home="r1").update(members)
    region = {m.slot: m.region for m in members}
    for row in parents:
        over = [region[p] for m, p in zip(members, row, strict=True) if p != AUTHORITY and region[p] != m.region]
        assert len(over) == 3
        assert over.count("r1") == from_home
    assert worst_load(members, parents) < 1.2


@pytest.mark.parametrize("count", [8, 64, 240])
def test_nodes_that_cannot_be_dialed_attach_to_those_that_can(count: int) -> None:
    """With half of the nodes behind NAT, nearly every edge has an end that can be dialed, and loads stay even."""
    members = [member(s, dialable=s % 2 == 0, peer=s.to_bytes(32, "big")) for s in range(count)]
    parents = plan(members, 8)
    dead = sum(
        parent != AUTHORITY and not m.dialable and not members[parent].dialable
        for row in parents
        for m, parent in zip(members, row, strict=True)
    )
    assert dead == 0
    assert worst_load(members, parents) < 1.6


def test_an_empty_swarm_has_a_plan() -> None:
    assert plan([], 4) == ((), (), (), ())


# ---------------------------------------------------------------- small changes


def moves(before: dict[int, tuple[int, ...]], after: dict[int, tuple[int, ...]]) -> int:
    """The number of edges of earlier members that lead to another parent now."""
    return sum(a != b for s in before.keys() & after.keys() for a, b in zip(before[s], after[s], strict=True))


def by_slot(members: list[Member], parents: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    return {m.slot: tuple(row[i] for row in parents) for i, m in enumerate(members)}


@settings(max_examples=60)
@given(swarms(), st.lists(swarms(most=6), min_size=1, max_size=8), STRIPES, st.randoms(use_true_random=False))
def test_any_sequence_of_joins_and_leaves_keeps_a_valid_plan(
    members: list[Member], waves: list[list[Member]], stripes: int, rng: random.Random
) -> None:
    """Members join, leave, become leaves and givers, change region and uplink: the plan stays valid, leaves stay
    leaves."""
    planner = Planner(stripes)
    now = {m.slot: m for m in members}
    for wave in waves:
        planner.update(list(now.values()), idle=rng.random() < 0.2)
        for m in wave:
            if m.slot in now and rng.random() < 0.5:
                del now[m.slot]
            else:
                now[m.slot] = m
        ordered = [now[s] for s in sorted(now)]
        parents = planner.update(ordered)
        plan_ = roster_of(ordered, parents)
        may = {m.slot for m in relays(ordered)}
        for k in range(stripes):
            assert {p for p in plan_.parents[k] if p != AUTHORITY} <= may
            assert not ordered or len(plan_.root_children(k)) == (1 if may else len(ordered))


@pytest.mark.parametrize(("count", "regions"), [(12, 1), (40, 4), (300, 1), (300, 4)])
def test_a_member_that_joins_or_leaves_moves_few_edges(count: int, regions: int) -> None:
    """At most the edges of its own children and `EXTRA_MOVES` move; none when a leaf joins."""
    rng = random.Random(5)
    planner, now = Planner(8), {m.slot: m for m in mixed_members(count, regions)}
    before = by_slot(list(now.values()), planner.update(list(now.values())))
    for turn in range(60):
        fed = dict.fromkeys(now, 0)
        for line in before.values():
            for parent in line:
                fed[parent] = fed.get(parent, 0) + 1
        slot = rng.choice(sorted(now))
        if turn % 3 == 0:
            bound = fed[slot] + EXTRA_MOVES
            del now[slot]
        elif turn % 3 == 1:
            slot = max(now) + 1
            now[slot] = member(slot, up_mbit=200.0, leaf=True, region=f"r{rng.randrange(regions)}")
            bound = 0
        else:
            now[slot] = member(slot, up_mbit=200.0, leaf=not now[slot].leaf, region=now[slot].region)
            bound = fed[slot] + 8 + EXTRA_MOVES
        members = [now[s] for s in sorted(now)]
        after = by_slot(members, planner.update(members))
        assert moves(before, after) <= bound
        before = after


def test_after_many_joins_and_leaves_a_plan_is_as_good_as_a_new_one() -> None:
    rng = random.Random(6)
    planner, now = Planner(8), {m.slot: m for m in mixed_members(300)}
    planner.update(list(now.values()))
    for turn in range(300):
        if turn % 2:
            del now[rng.choice(sorted(now))]
        else:
            slot = max(now) + 1
            now[slot] = member(slot, up_mbit=200 * rng.lognormvariate(0, 0.5), region="r0")
        members = [now[s] for s in sorted(now)]
        parents = planner.update(members)
    fresh = plan(members, 8)
    assert worst_load(members, parents) < 1.4 * worst_load(members, fresh)
    assert depth_of(members, parents) <= depth_of(members, fresh) + 4


@pytest.mark.parametrize("last", range(8))
def test_a_small_swarm_crosses_borders_as_seldom_as_one_planned_at_once(last: int) -> None:
    everybody = equal_members(8, regions=4)
    planner = Planner(8, "r0")
    planner.update([m for m in everybody if m.slot != last], idle=True)
    planner.update(
        [replace(m, leaf=m.slot == last) for m in everybody], idle=True
    )  # it becomes interior once it holds the model
    parents = planner.update(everybody, idle=True)
    fresh = Planner(8, "r0").update(everybody)
    assert sum(crossings(everybody, parents)) <= sum(crossings(everybody, fresh))
    assert worst_load(everybody, parents) <= 1.25 * worst_load(everybody, fresh)


@pytest.mark.parametrize("seed", range(10))
def test_a_small_swarm_that_joined_one_by_one_is_planned_as_if_at_once(seed: int) -> None:
    rng = random.Random(seed)
    uplinks = [400, 200, 200, 100, 100, 50, 50, 25]
    rng.shuffle(uplinks)
    everybody = [member(s, up_mbit=up, peer=s.to_bytes(32, "big")) for s, up in enumerate(uplinks)]
    planner = Planner(8)
    proven: list[int] = []
    for slot in rng.sample(range(8), 8):
        proven.append(slot)
        planner.update([replace(m, leaf=m.slot not in proven) for m in everybody], idle=rng.random() < 0.7)
    parents = planner.update(everybody, idle=True)
    fresh = Planner(8).update(everybody)
    assert worst_load(everybody, parents) <= 1.02 * worst_load(everybody, fresh)
    assert sum(len(set(row)) for row in parents) <= sum(len(set(row)) for row in fresh)


def test_a_member_that_turns_out_slower_sheds_children() -> None:
    members = equal_members(20)
    planner = Planner(8)
    planner.update(members)
    slow = [member(0, up_mbit=20.0, peer=members[0].peer), *members[1:]]
    parents = planner.update(slow)
    assert child_counts(slow, parents)[0] <= 3
    assert worst_load(slow, parents) < 2.0


def test_a_member_whose_region_becomes_known_moves_there() -> None:
    members = [member(s, region=f"r{s % 2}") for s in range(16)] + [member(16, leaf=True)]
    planner = Planner(8)
    planner.update(members)
    known = [*members[:-1], member(16, leaf=True, region="r1")]
    parents = planner.update(known)
    assert all(row[16] % 2 == 1 for row in parents)


def test_many_joins_during_a_version_move_no_earlier_member() -> None:
    """Newcomers have nothing to give yet. Growing the trees anew would give all members new parents during a step."""
    were = [member(slot, peer=PEERS[slot], up_mbit=200.0, leaf=False) for slot in range(64)]
    come = [member(slot, peer=PEERS[slot], up_mbit=200.0, leaf=True) for slot in range(64, 128)]
    planner = Planner(8)
    before = planner.update(were, idle=True)
    after = planner.update([*were, *come], idle=False)
    assert [row[:64] for row in after] == list(before)
    roster_of([*were, *come], after)
    anew = planner.update([*were, *come], idle=True)
    assert anew != after, "once no version is on its way"
