"""Whole swarms on the simulator: the product's own cores, under failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.sim.simulator import Faults, Node, Published, World
from swarm.protocol.authority import Authority
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.member import Peer

UP_BPS = 200e6


def a_swarm(nodes: int, seed: int = 0) -> tuple[World, list[Node]]:
    """A swarm whose members hold version 0 and are attached in every tree."""
    world = World(Tuning.loopback(), seed=seed)
    joined = [world.join(held=world.base) for _ in range(nodes)]
    assert world.run_until(lambda: all(grant_of(n) is not None for n in joined), 5)
    world.run(world.now + 2)
    return world, joined


def peer_of(node: Node) -> Peer:
    assert isinstance(node.core, Peer)
    return node.core


def core_of(world: World) -> Authority:
    assert isinstance(world.authority.core, Authority)
    return world.authority.core


def grant_of(node: Node):
    return peer_of(node).state.grant


def bound_s(published: Published) -> float:
    """A lower bound on the time to get a version, in seconds: one copy through one uplink."""
    return published.payload_bytes * 8 / UP_BPS


def notices_of(node: Node, what: str) -> list[dict]:
    return [n.log_fields() for n in node.notices if n.log_name == what]


def all_get(world: World, published: Published, limit_s: float = 20.0) -> float:
    """Seconds from publishing until every living member holds it."""
    assert world.run_until(lambda: world.all_hold(published.id), limit_s), describe_lacking(world, published)
    return world.now - published.at


def describe_lacking(world: World, published: Published) -> str:
    return "; ".join(
        f"node {n.number} holds {n.core.state.held}, {peer_of(n).catchup.phase.value}, "
        f"slot {g.slot if (g := grant_of(n)) else None}"
        for n in world.members()
        if n.core.state.held != published.id
    )


def an_interior_node(world: World) -> Node:
    """The member with most children in the trees."""
    roster = core_of(world).state.roster
    assert roster is not None

    def child_count(node: Node) -> int:
        grant = grant_of(node)
        return sum(len(roster.children(k, grant.slot)) for k in range(roster.stripes)) if grant else 0

    return max(world.members(), key=child_count)


# ---------------------------------------------------------------- one copy, no duplicates


@pytest.mark.parametrize("nodes", [3, 5, 8])
def test_three_versions_leave_the_trainer_once_each_and_arrive_once(nodes: int) -> None:
    world, joined = a_swarm(nodes)
    for number in range(1, 4):
        before = world.authority.sent_bytes
        published = world.publish(chunks=40)
        seconds = all_get(world, published)
        assert published.id == VersionId(0, number)
        assert world.authority.sent_bytes - before == published.payload_bytes
        assert seconds < 1.35 * bound_s(published) + 0.1
        world.run(world.now + 0.5)
    assert [n.duplicate_bytes for n in joined] == [0] * nodes
    assert all(n.root == world.authority.root for n in joined)


def test_the_first_version_of_a_swarm_of_newcomers() -> None:
    """All members are leaves, so the trainer feeds them itself: no worse than a star."""
    world = World(Tuning.loopback())
    for _ in range(3):
        world.join(held=world.base)
    world.run(0.2)
    published = world.publish(chunks=8)
    all_get(world, published)
    assert world.authority.sent_bytes <= 3 * published.payload_bytes


def test_an_empty_version() -> None:
    world, _ = a_swarm(3)
    all_get(world, world.publish(chunks=0), 2.0)


def test_versions_published_faster_than_they_travel() -> None:
    world, _ = a_swarm(4)
    for _ in range(5):
        published = world.publish(chunks=8)
        world.run(world.now + 0.01)
    all_get(world, published)


def test_a_crowd_of_joiners_is_planned_for_together() -> None:
    world = World(Tuning.loopback())
    crowd = [world.join(held=world.base) for _ in range(30)]
    assert world.run_until(lambda: all(grant_of(n) is not None for n in crowd), 2)
    plans = notices_of(world.authority, "planned")
    assert len(plans) <= 4
    assert len({grant_of(n).slot for n in crowd}) == 30


# ---------------------------------------------------------------- death and standstill


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_an_interior_node_is_lost_at_half_time(how: str) -> None:
    world, _ = a_swarm(4)
    before = world.authority.sent_bytes
    published = world.publish(chunks=100, chunk_bytes=1 << 20)
    world.run(world.now + bound_s(published) / 2)
    getattr(world, how)(an_interior_node(world))
    assert all_get(world, published) < 1.5 * bound_s(published)
    assert world.authority.sent_bytes - before < 1.15 * published.payload_bytes
    assert all_get(world, world.publish(chunks=20)) < 1.0


def test_a_frozen_node_thaws_after_its_lease_ended_and_catches_up() -> None:
    world, joined = a_swarm(4)
    sleeper = an_interior_node(world)
    first = grant_of(sleeper)
    world.freeze(sleeper)
    for _ in range(3):
        all_get(world, world.publish(chunks=4))
        world.run(world.now + 4)
    assert notices_of(world.authority, "lease_expired") == [{"slot": first.slot, "peer": sleeper.key.public}]
    world.thaw(sleeper)
    published = world.publish(chunks=4)
    assert all_get(world, published, 10.0) < 10
    assert grant_of(sleeper).serial > first.serial
    assert not sleeper.banned
    assert not any(n.banned for n in joined)


def test_a_pause_within_the_lease_costs_only_time() -> None:
    world, joined = a_swarm(4)
    world.freeze(joined[1])
    published = world.publish(chunks=20)
    world.run(world.now + 2.0)
    world.thaw(joined[1])
    all_get(world, published, 10.0)
    assert notices_of(world.authority, "lease_expired") == []


def test_everyone_but_one_is_lost() -> None:
    world, joined = a_swarm(5)
    published = world.publish(chunks=40)
    world.run(world.now + bound_s(published) / 2)
    for node in joined[:4]:
        world.kill(node)
    all_get(world, published)


def test_a_silent_node_loses_its_lease_and_joins_again() -> None:
    world, joined = a_swarm(3)
    lonely = joined[0]
    for node in [world.authority, *joined[1:]]:
        world.cut(lonely, node)
    world.run(world.now + 8)
    assert notices_of(world.authority, "lease_expired")[0]["peer"] == lonely.key.public
    world.heal()
    published = world.publish(chunks=4)
    all_get(world, published, 15.0)
    assert world.run_until(lambda: len(core_of(world).book.leases) == 3, 5)


def test_a_slot_that_a_newcomer_took_stays_with_it() -> None:
    world, joined = a_swarm(3)
    gone = joined[0]
    slot = grant_of(gone).slot
    world.freeze(gone)
    world.run(world.now + 8)
    newcomer = world.join(held=world.base)
    assert world.run_until(lambda: grant_of(newcomer) is not None, 5)
    assert grant_of(newcomer).slot == slot
    world.thaw(gone)
    all_get(world, world.publish(chunks=4), 15.0)
    assert grant_of(newcomer).slot == slot
    assert grant_of(gone).slot != slot


# ---------------------------------------------------------------- coming and going


def test_a_joiner_with_nothing_in_the_middle_of_a_publish() -> None:
    world, _ = a_swarm(4)
    for _ in range(2):
        all_get(world, world.publish(chunks=10))
    published = world.publish(chunks=40, spread_s=0.5)
    world.run(world.now + 0.2)
    before = world.authority.sent_bytes
    joiner = world.join()
    all_get(world, published)
    assert joiner.root == world.authority.root
    assert world.authority.sent_bytes - before <= published.payload_bytes + 64 * 1024
    assert notices_of(joiner, "caught_up")


def test_a_joiner_from_the_base_folder_replays_and_fetches_no_block() -> None:
    world, _ = a_swarm(4)
    for _ in range(3):
        published = world.publish(chunks=10)
        all_get(world, published)
    joiner = world.join(held=world.base)
    all_get(world, published, 10.0)
    assert [t["blocks"] for t in notices_of(joiner, "caught_up")] in ([], [0])
    assert joiner.root == world.authority.root


def test_a_joiner_far_behind_fetches_blocks_from_peers() -> None:
    world, _ = a_swarm(4)
    for _ in range(20):
        published = world.publish(chunks=2, chunk_bytes=1 << 16)
        all_get(world, published)
    before = world.authority.sent_bytes
    joiner = world.join(held=world.base)
    all_get(world, published, 30.0)
    assert notices_of(joiner, "caught_up")[-1]["blocks"] == world.blocks
    assert world.authority.sent_bytes == before


def test_a_joiner_while_versions_keep_coming() -> None:
    world, _ = a_swarm(4)
    all_get(world, world.publish(chunks=4))
    world.join()
    for _ in range(6):
        published = world.publish(chunks=4)
        world.run(world.now + 0.15)
    all_get(world, published)


def test_joiners_are_served_by_the_authority_when_all_holders_are_frozen() -> None:
    """The other sources do not answer, so the authority is asked as the last resort."""
    world, joined = a_swarm(2)
    for node in joined:
        world.freeze(node)
    joiner = world.join()
    assert world.run_until(lambda: joiner.core.state.held == VersionId(0, 0), 60)


def test_leaving_frees_the_slot_and_disturbs_no_other() -> None:
    world, joined = a_swarm(5)
    published = world.publish(chunks=40)
    world.run(world.now + bound_s(published) / 2)
    goer = an_interior_node(world)
    world.leave(goer)
    assert world.run_until(lambda: len(core_of(world).book.leases) == 4, 1)
    joined.remove(goer)
    world.kill(goer)
    all_get(world, published)
    assert notices_of(world.authority, "lease_expired") == []


def test_leaving_without_a_path_to_the_authority() -> None:
    world, joined = a_swarm(5)
    world.cut(joined[0], world.authority)
    world.leave(joined[0])
    assert world.run_until(lambda: len(core_of(world).book.leases) == 4, 1)


# ---------------------------------------------------------------- the authority


def test_the_authority_is_killed_while_publishing_and_tries_again() -> None:
    world, _ = a_swarm(4)
    world.publish(chunks=40, seal=False, spread_s=0.5)
    world.run(world.now + 0.3)
    world.restart_authority()
    world.run(world.now + 2)
    published = world.publish(chunks=40, attempt=1)
    all_get(world, published)
    assert all(key.attempt == 1 for n in world.members() for key in n.headers if key.version == 1)


def test_an_authority_that_restarts_keeps_its_leases_and_its_plan() -> None:
    """No member joins again, and none is fed by the trainer instead of its parent, which would be a star."""
    world, joined = a_swarm(5)
    all_get(world, world.publish(chunks=8))
    grants = [grant_of(n) for n in joined]
    world.restart_authority()
    world.run(world.now + 3)
    assert [grant_of(n) for n in joined] == grants
    before = world.authority.sent_bytes
    published = world.publish(chunks=40)
    all_get(world, published)
    assert world.authority.sent_bytes - before == published.payload_bytes
    roster = core_of(world).state.roster
    assert roster is not None
    assert all(peer_of(n).state.roster == roster for n in joined)


def test_a_grant_of_an_earlier_boot_never_passes_for_one_of_this_boot() -> None:
    world, joined = a_swarm(3)
    goer = joined[2]
    old = grant_of(goer)
    world.leave(goer)
    world.run(world.now + 1)
    world.kill(goer)
    world.restart_authority()
    newcomer = world.join(held=world.base)
    assert world.run_until(lambda: grant_of(newcomer) is not None, 5)
    assert grant_of(newcomer).slot == old.slot
    assert grant_of(newcomer).serial > old.serial


def test_sealed_versions_keep_flowing_without_the_authority() -> None:
    world, _ = a_swarm(5)
    published = world.publish(chunks=40)
    world.run(world.now + 1.1 * bound_s(published))
    world.kill(world.authority)
    all_get(world, published)
    world.run(world.now + 30)
    assert all(peer_of(n).standing(world.now).value == "fresh" for n in world.members())


def test_a_rollback_to_an_older_version_in_a_new_epoch() -> None:
    world, _ = a_swarm(4)
    for _ in range(3):
        all_get(world, world.publish(chunks=4))
    published = world.roll_back(VersionId(0, 1))
    all_get(world, published, 30.0)
    assert published.id == VersionId(1, 2)
    assert all(n.root == world.authority.root for n in world.members())


def test_a_relay_follows_into_a_new_epoch() -> None:
    world, _ = a_swarm(3)
    world.join(relay=True)
    for _ in range(3):
        all_get(world, world.publish(chunks=4))
    all_get(world, world.roll_back(VersionId(0, 1)), 30.0)
    all_get(world, world.publish(chunks=4))


# ---------------------------------------------------------------- the network


def test_a_partition_heals() -> None:
    world, joined = a_swarm(6)
    for a in joined[:3]:
        for b in [world.authority, *joined[3:]]:
            world.cut(a, b)
    published = world.publish(chunks=20)
    world.run(world.now + 3)
    assert all(n.core.state.held == published.id for n in joined[3:])
    assert not any(n.core.state.held == published.id for n in joined[:3])
    world.heal()
    all_get(world, published, 15.0)


def test_cut_from_the_authority_alone() -> None:
    world, joined = a_swarm(6)
    for node in joined[:4]:
        world.cut(node, world.authority)
    all_get(world, world.publish(chunks=20), 15.0)
    world.run(world.now + 10)
    assert notices_of(world.authority, "lease_expired") == []
    all_get(world, world.publish(chunks=20), 15.0)


def test_cut_from_all_for_a_moment_and_from_the_authority_for_good() -> None:
    """Failed dials to any peer are tried again; once only those to the authority were."""
    world, joined = a_swarm(4)
    for node in [world.authority, *joined[1:]]:
        world.cut(joined[0], node)
    world.run(world.now + 3)
    world.heal()
    world.cut(joined[0], world.authority)
    all_get(world, world.publish(chunks=8), 20.0)


def test_nodes_that_cannot_be_dialed() -> None:
    world, _ = a_swarm(3)
    for _ in range(3):
        world.join(dialable=False, held=world.base)
    world.run(world.now + 3)
    for _ in range(2):
        before = world.authority.sent_bytes
        published = world.publish(chunks=20)
        all_get(world, published)
        assert world.authority.sent_bytes - before <= 1.1 * published.payload_bytes


def test_a_relay_passes_on_without_a_replica() -> None:
    world, _ = a_swarm(2)
    relay = world.join(relay=True)
    world.run(world.now + 2)
    for _ in range(2):
        all_get(world, world.publish(chunks=20))
    assert relay.root == b""
    assert relay.sent_bytes > 0


@settings(max_examples=12)
@given(
    st.integers(0, 1 << 16),
    st.floats(0, 0.15),
    st.floats(0, 0.3),
    st.floats(0, 0.3),
    st.integers(3, 5),
    st.sampled_from(["nothing", "kill", "freeze", "join", "restart"]),
)
def test_with_any_message_faults_all_hold_the_head_in_the_end(
    seed: int, drop: float, repeat: float, delay: float, nodes: int, mishap: str
) -> None:
    """Control messages are lost, repeated, late and reordered, which real streams do not allow."""
    world, joined = a_swarm(nodes, seed=seed)
    world.faults = Faults(drop, repeat, delay, 0.5)
    for step in range(2):
        world.publish(chunks=6)
        world.run(world.now + 0.3)
        if step == 0 and mishap in ("kill", "freeze"):
            getattr(world, mishap)(joined[0])
        elif step == 0 and mishap == "join":
            world.join()
        elif step == 0 and mishap == "restart":
            world.restart_authority()
        world.run(world.now + 1)
    world.faults = Faults()
    published = world.publish(chunks=6, attempt=1)
    all_get(world, published, 60.0)


# ---------------------------------------------------------------- the simulator itself


def test_the_simulated_swarm_is_the_product() -> None:
    world, joined = a_swarm(2)
    assert {type(n.core) for n in joined} == {Peer}
    assert type(world.authority.core) is Authority
    assert Peer.__module__ == "swarm.protocol.member"


EVENTFUL = """
import sys
sys.path.insert(0, sys.argv[1])
from test_swarm import eventful
print(eventful(int(sys.argv[2])))
"""


def eventful(seed: int) -> str:
    """The digest of a short run with some of every kind of event."""
    world, joined = a_swarm(5, seed=seed)
    world.faults = Faults(0.02, 0.05, 0.1, 0.2)
    world.publish(chunks=12)
    world.run(world.now + 0.1)
    world.kill(joined[0])
    world.join()
    world.run(world.now + 2)
    world.publish(chunks=12)
    world.freeze(joined[1])
    world.run(world.now + 5)
    return f"{world.digest} {world.events}"


def test_one_seed_gives_one_run_for_any_hash_seed() -> None:
    here = str(Path(__file__).parent)
    house = Path(__file__).parents[3]
    story = eventful(3)
    again = subprocess.run(
        [sys.executable, "-c", EVENTFUL, here, "3"],
        env={**os.environ, "PYTHONPATH": str(house), "PYTHONHASHSEED": "1"},
        cwd=house,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    assert again == story
    assert eventful(4) != story
