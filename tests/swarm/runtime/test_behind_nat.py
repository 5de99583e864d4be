"""Members and a seed that cannot be dialed, over the memory transport on a virtual clock."""

from pathlib import Path

import trio
from runtime_kit import Host, Swarm, key, swarm, until

from swarm.protocol.core.events import VersionId
from swarm.transport.base import PathKind


async def follow(s: Swarm, hosts: list[Host], number: int) -> None:
    root = await s.publish(number)
    await until(lambda: all(h.model is not None and h.model.version == VersionId(0, number) for h in hosts))
    assert {h.root for h in hosts} == {root}


async def start(s: Swarm, numbers: range, hidden: set[int]) -> list[Host]:
    for number in hidden:
        s.network.shield(key(number).public)
    return [await s.start_member(number) for number in numbers]


def members(s: Swarm) -> dict[str, bool]:
    """Map each member's name to whether the roster says that it can be dialed."""
    return {member.name: member.dialable for member in s.authority.core.state.roster.members}


async def test_addresses_are_confirmed_by_dialing_back(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        await start(s, range(1, 5), {2, 3})
        await until(lambda: len(members(s)) == 4 and members(s)["n1"] and members(s)["n4"])
        assert members(s) == {"n1": True, "n2": False, "n3": False, "n4": True}
        assert [bool(m.addrs) for m in s.authority.core.state.roster.members if not m.dialable] == [False, False]


async def test_a_member_that_cannot_be_dialed_is_interior_in_a_tree(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        hosts = await start(s, range(1, 7), {2, 4})
        await follow(s, hosts, 1)
        await until(lambda: not any(member.leaf for member in s.authority.core.state.roster.members))
        for number in (2, 3, 4):
            await follow(s, hosts, number)
        roster = s.authority.core.state.roster
        inside = {
            slot: {child for stripe in range(roster.stripes) for child in roster.children(stripe, slot)}
            for slot in (member.slot for member in roster.members if not member.dialable)
        }
        assert any(inside.values()), "the plan uses the uplinks of members that cannot be dialed"
        for slot, children in inside.items():
            for child in children:
                parent, below = roster.member(slot), roster.member(child)
                assert below.dialable, "an edge without a dialable end"
                host = next(h for h in hosts if h.transport.key == parent.peer)
                assert host.transport.path_kind(below.peer) in (PathKind.DIALED, PathKind.ACCEPTED)


async def test_a_seed_that_cannot_be_dialed_is_reached_through_a_relay(tmp_path: Path, autojump_clock: object) -> None:
    """The relay is also a member: it joins over the connection on which the seed holds its reservation."""
    async with swarm(tmp_path, via=("/memory/2",)) as s:
        relay = await s.start_member(1, relay=True)
        assert relay.transport.address == "/memory/2"
        await until(lambda: len(s.authority.core.state.roster.members) == 1 if s.authority.core.state.roster else False)
        hosts = await start(s, range(2, 6), {3, 5})
        await until(lambda: len(members(s)) == 5)
        await follow(s, hosts, 1)
        await trio.sleep(2)
        await follow(s, hosts, 2)
        seed = s.authority.transport
        for number, host in zip(range(2, 6), hosts, strict=True):
            path_kind = seed.path_kind(host.transport.key)
            # The seed dialed back each member that can be dialed, and that connection replaced the circuit.
            assert path_kind is None or (path_kind is PathKind.CIRCUIT) == (number in (3, 5)), (number, path_kind)
