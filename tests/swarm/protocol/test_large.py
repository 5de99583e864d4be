"""Large simulated swarms: sessions of the trainer, newcomers, overstated uplinks, and removals."""

import pytest

from scenarios.sim.simulator import Link, Node, World
from swarm.protocol.authority import Authority
from swarm.protocol.core.notices import JoinRefused, LeaseExpired
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.member import Peer


def core_of(world: World) -> Authority:
    assert isinstance(world.authority.core, Authority)
    return world.authority.core


def grant_of(node: Node):
    assert isinstance(node.core, Peer)
    return node.core.state.grant


def member_of(world: World, node: Node):
    roster = core_of(world).state.roster
    assert roster is not None
    return roster.member_of(node.key.public)


def children(world: World, node: Node) -> int:
    roster = core_of(world).state.roster
    grant = grant_of(node)
    assert roster is not None
    assert grant is not None
    return sum(len(roster.children(k, grant.slot)) for k in range(roster.stripes))


def a_swarm(nodes: int, links: list[Link] | None = None) -> tuple[World, list[Node]]:
    world = World(Tuning.loopback())
    joined = [world.join(links[i] if links else None, held=world.base) for i in range(nodes)]
    assert world.run_until(lambda: all(grant_of(n) is not None for n in joined), 10)
    world.run(world.now + 3)
    return world, joined


def step(world: World, chunks: int = 16) -> None:
    published = world.publish(chunks=chunks)
    assert world.run_until(lambda: world.all_hold(published.id), 30)
    world.run(world.now + 1)


@pytest.mark.slow
def test_the_trainer_keeps_few_sessions_and_loses_no_member() -> None:
    world, joined = a_swarm(80)
    world.run(world.now + 4)
    kept = core_of(world).state.tuning.sessions_kept
    assert len(world.authority.sessions) <= kept
    assert all(grant_of(n) is not None for n in joined)
    step(world)
    world.run(world.now + 8)  # longer than leases last without renewal
    assert len(world.authority.sessions) <= kept
    assert [n for n in world.authority.notices if isinstance(n, LeaseExpired)] == []
    roster = core_of(world).state.roster
    assert roster is not None
    assert {n.core.state.rosters.stamp for n in joined} == {roster.stamp}


@pytest.mark.slow
def test_after_a_restart_only_a_few_members_dial_the_trainer() -> None:
    world, joined = a_swarm(80)
    grants = [grant_of(n) for n in joined]
    world.run(world.now + 4)
    world.restart_authority()
    most = 0
    for _ in range(60):
        world.run(world.now + 0.1)
        most = max(most, len(world.authority.sessions))
    assert most <= 60
    assert [grant_of(n) for n in joined] == grants
    step(world)


def test_a_newcomer_is_a_leaf_until_it_has_served() -> None:
    world, _ = a_swarm(6)
    step(world)
    newcomer = world.join(held=world.base)
    assert world.run_until(lambda: grant_of(newcomer) is not None, 5)
    world.run(world.now + 0.3)
    first = member_of(world, newcomer)
    assert first is not None
    assert first.leaf
    assert children(world, newcomer) == 0
    for _ in range(3):
        step(world)
        world.run(world.now + 2)
    later = member_of(world, newcomer)
    assert later is not None
    assert not later.leaf
    assert children(world, newcomer) > 0


def test_a_member_that_offers_no_uplink_stays_a_leaf() -> None:
    world = World(Tuning.loopback())
    for _ in range(4):
        world.join(held=world.base)
    idle = world.join(Link(up_mbit=0.0), held=world.base)
    world.run(world.now + 3)
    for _ in range(2):
        step(world)
    member = member_of(world, idle)
    assert member is not None
    assert member.leaf
    assert children(world, idle) == 0
    assert idle.sent_bytes == 0


@pytest.mark.slow
@pytest.mark.long
def test_an_overstated_uplink_is_found_out() -> None:
    """A member offers 800 Mbit/s and has 20: after two versions it has no more children than others of 20 Mbit/s."""
    world, joined = a_swarm(8)
    boaster = world.join(Link(up_mbit=20.0), held=world.base, known_mbit=800.0)
    world.run(world.now + 3)
    for _ in range(4):
        step(world, chunks=32)
        world.run(world.now + 2)
    member = member_of(world, boaster)
    assert member is not None
    assert member.up_mbit < 100.0
    assert children(world, boaster) <= min(children(world, n) for n in joined)


def test_a_revoked_ticket_removes_its_nodes_and_admits_none() -> None:
    world, joined = a_swarm(5)
    ticket = core_of(world).book.leases[grant_of(joined[0]).slot].grant.capability
    world._carry_out(world.authority, core_of(world).revoke(ticket, world.now))
    world.run(world.now + 2)
    assert not core_of(world).book.leases
    late = world.join(held=world.base)
    world.run(world.now + 2)
    assert grant_of(late) is None
    assert [n.code for n in late.notices if isinstance(n, JoinRefused)][:1] == ["ticket"]
    world.restart_authority()
    again = world.join(held=world.base)
    world.run(world.now + 2)
    assert grant_of(again) is None
