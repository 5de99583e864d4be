"""Made-up swarms for the planner's tests."""

from hypothesis import strategies as st
from protocol_kit import SWARM, key_of, member, roster

from swarm.protocol.membership.roster import AUTHORITY, Member, Roster, open_whole
from swarm.protocol.topology.planner import Planner

PEERS = {slot: key_of(slot).public for slot in range(200)}
STRIPES = st.integers(1, 12)


@st.composite
def swarms(draw: st.DrawFn, most: int = 40) -> list[Member]:
    """Members of every kind: leaves, members behind NAT, in known and unknown regions."""
    slots = draw(st.sets(st.integers(0, 199), min_size=1, max_size=most))
    regions = draw(st.sampled_from([("",), ("", "eu", "us"), ("eu", "us", "jp", "au")]))
    return [
        member(
            slot,
            peer=PEERS[slot],
            up_mbit=draw(st.sampled_from([0.0, 1.0, 25.0, 100.0, 100.0, 200.0, 1000.0])),
            leaf=draw(st.integers(0, 4)) == 0,
            dialable=draw(st.integers(0, 3)) > 0,
            region=draw(st.sampled_from(regions)),
        )
        for slot in sorted(slots)
    ]


def plan(members: list[Member], stripes: int) -> tuple[tuple[int, ...], ...]:
    """A plan from nothing."""
    return Planner(stripes).update(members)


def as_roster(members: list[Member], stripes: int) -> Roster:
    """A plan from nothing as a roster, opened as a peer opens it, which refuses an invalid plan."""
    return roster_of(members, plan(members, stripes))


def roster_of(members: list[Member], parents: tuple[tuple[int, ...], ...]) -> Roster:
    """These trees as a roster, opened as a peer opens it, which refuses an invalid plan."""
    return open_whole(roster(parents, members), SWARM)[0]


def relays(members: list[Member]) -> list[Member]:
    return [m for m in members if not m.leaf and m.up_mbit > 0]


def child_counts(members: list[Member], parents: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    """The number of children of each slot, over all stripes."""
    count = dict.fromkeys((m.slot for m in members), 0)
    for row in parents:
        for parent in row:
            if parent != AUTHORITY:
                count[parent] += 1
    return count
