"""The roster: look-ups, failover parents, changes, and invalid rosters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_kit import STRIPES, as_roster, swarms
from protocol_kit import AUTHORITY as KEY
from protocol_kit import SWARM, key_of, member, roster

from codec.errors import PeerError
from swarm.protocol.membership.roster import (
    AUTHORITY,
    Change,
    Member,
    Roster,
    advance,
    difference,
    open_change,
    open_whole,
    seal_change,
    whole,
)
from swarm.protocol.topology.planner import Planner


def opened(data: bytes) -> Roster:
    return open_whole(data, SWARM)[0]


def planned(members: list[Member], serial: int = 1, planner: Planner | None = None) -> Roster:
    parents = (planner or Planner(4)).update(members)
    return Roster(SWARM, 1, serial, ("/sim/authority",), tuple(sorted(members, key=lambda m: m.slot)), parents)


def test_lookups() -> None:
    members = [member(3), member(7), member(9)]
    plan_ = opened(roster([(7, AUTHORITY, 7), (AUTHORITY, 3, 3)], members))
    assert plan_.member(7) == members[1]
    assert plan_.member(4) is None
    assert plan_.member_of(members[2].peer) == members[2]
    assert plan_.member_of(bytes(32)) is None
    assert plan_.children(0, 7) == [3, 9]
    assert plan_.children(1, 7) == []
    assert plan_.root_children(1) == [3]
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
        pytest.param([(AUTHORITY, 5)], TWO, id="a parent that does not exist"),
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
        opened(roster(parents, members))


def test_forged_truncated_or_of_another_swarm() -> None:
    good = roster([(AUTHORITY, 0)], TWO)
    assert opened(good).serial == 1
    for bad in (roster([(AUTHORITY, 0)], TWO, key=key_of("mallory")), good[:-1], good + b"\0", b"", good[:64]):
        with pytest.raises(PeerError):
            opened(bad)
    with pytest.raises(PeerError):
        open_whole(good, key_of("other").public)
    assert KEY.public == SWARM


@given(swarms(), STRIPES)
def test_failover_parents_are_never_below_the_orphan(members: list[Member], stripes: int) -> None:
    plan_ = as_roster(members, stripes)
    for stripe in range(stripes):
        for m in members:
            found = plan_.failover_parents(stripe, m.slot)
            assert len(set(found)) == len(found)
            assert m.slot not in found
            assert plan_.parent(stripe, m.slot) not in found
            assert not any(m.slot in plan_.ancestors(stripe, b) for b in found)
            assert AUTHORITY not in found


@given(swarms(), st.data())
def test_failover_parents_among_some_keep_their_order(members: list[Member], data: st.DataObject) -> None:
    plan_ = as_roster(members, 4)
    slots = [m.slot for m in members]
    some = data.draw(st.lists(st.sampled_from(slots), unique=True))
    slot = data.draw(st.sampled_from(slots))
    assert plan_.failover_parents(2, slot, among=some) == [b for b in plan_.failover_parents(2, slot) if b in some]
    assert plan_.failover_parents(2, slot, among=[10_000]) == []


def test_orphans_of_one_parent_spread() -> None:
    members = [member(s, peer=s.to_bytes(32, "little")) for s in range(64)]
    plan_ = Roster(SWARM, 1, 1, (), tuple(members), Planner(8).update(members))
    head = plan_.root_children(0)[0]
    first = [plan_.failover_parents(0, orphan)[0] for orphan in plan_.children(0, head)]
    assert len(set(first)) > len(first) // 2


def test_other_orphans_of_the_lost_parent_are_the_last_failover_parents() -> None:
    # 1 is the root child, with children 0 and 2; 0 has 3, 4, 5; 3 has 6; 2 has 7. Without 0: 4, 5 and 6 are orphans.
    plan_ = Roster(SWARM, 1, 1, (), tuple(member(s) for s in range(8)), ((1, -1, 1, 0, 0, 0, 3, 2),))
    found = plan_.failover_parents(0, 3)
    assert found[0] == 1
    assert set(found[1:3]) == {2, 7}
    assert set(found[3:]) == {4, 5}


# ---------------------------------------------------------------- changes


def small() -> list[Member]:
    return [member(s, peer=s.to_bytes(32, "little")) for s in range(40)]


@given(swarms(), swarms())
def test_a_change_leads_from_any_roster_to_any_other(before: list[Member], after: list[Member]) -> None:
    old, new = planned(before), planned(after, 2)
    change = difference(old, new)
    if change.base:
        assert advance(old, seal_change(change, KEY), SWARM) == new
    else:  # no smaller than the roster itself
        assert (change.members, change.gone, change.digest) == ((), (), new.digest)


def test_a_newcomer_is_a_small_change() -> None:
    planner = Planner(4)
    old = planned(small()[:-1], 1, planner)
    new = planned(small(), 2, planner)
    sealed = seal_change(difference(old, new), KEY)
    assert len(sealed) < 500 < len(whole(new, sealed))
    assert advance(old, sealed, SWARM) == new


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"moves": (((0, 1), (1, 0)), (), (), ())}, id="a cycle"),
        pytest.param({"moves": (((0, 77),), (), (), ())}, id="a parent that does not exist"),
        pytest.param({"moves": (((77, 0),), (), (), ())}, id="a slot that does not exist"),
        pytest.param({"moves": ((),)}, id="other stripes"),
        pytest.param({"gone": (77,)}, id="removes a slot that is not there"),
        pytest.param({"gone": tuple(range(39))}, id="removes parents and keeps their children"),
        pytest.param({"members": (member(41, peer=bytes(32)),)}, id="a peer twice"),
        pytest.param({"base": 1}, id="of another roster"),
        pytest.param({"digest": bytes(32)}, id="it leads elsewhere"),
    ],
)
def test_a_change_that_does_not_fit(broken: dict) -> None:
    old = planned(small())
    fields: dict = {"moves": ((), (), (), ()), "gone": (), "members": (), "base": old.stamp} | broken
    change = Change(SWARM, 1, 2, fields["base"], old.authority, fields["gone"], fields["members"], fields["moves"],
                    fields.get("digest", b"") or honest_digest(old, fields))  # fmt: skip
    with pytest.raises(PeerError, match="roster"):
        advance(old, seal_change(change, KEY), SWARM)


def honest_digest(old: Roster, fields: dict) -> bytes:
    """A change with the right digest, so that only its content is wrong."""
    members = {m.slot: m for m in old.members if m.slot not in fields["gone"]} | {m.slot: m for m in fields["members"]}
    rows = []
    for k, row in enumerate(old.parents):
        parents = {m.slot: p for m, p in zip(old.members, row, strict=True)}
        parents |= dict(fields["moves"][k]) if k < len(fields["moves"]) else {}
        rows.append(tuple(parents.get(s, AUTHORITY) for s in sorted(members)))
    return Roster(SWARM, 1, 2, old.authority, tuple(members[s] for s in sorted(members)), tuple(rows)).digest


def test_a_forged_change() -> None:
    old, new = planned(small()[:-1]), planned(small(), 2)
    with pytest.raises(PeerError, match="signature"):
        open_change(seal_change(difference(old, new), key_of("mallory")), SWARM)


def test_a_roster_under_the_proof_of_another() -> None:
    old, new = planned(small()[:-1]), planned(small(), 2)
    with pytest.raises(PeerError, match="not the roster that its change names"):
        open_whole(whole(old, seal_change(difference(old, new), KEY)), SWARM)
