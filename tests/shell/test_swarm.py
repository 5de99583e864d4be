"""Seed and members over the memory transport: the product's cores, shells, stores and codec, on a virtual clock."""

from pathlib import Path

from shell_kit import AUTHORITY, swarm, until

from swarm.protocol.events import VersionId


async def test_members_catch_up_and_follow(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        first = await s.start_member(1)
        second = await s.start_member(2)
        hosts = [first, second]
        await until(lambda: all(h.model.version == VersionId(0, 0) for h in hosts))
        assert {h.root for h in hosts} == {s.authority.root}
        for number in (1, 2, 3):
            root = await s.publish(number)
            assert s.authority.root == root
            await until(lambda number=number: all(h.model.version == VersionId(0, number) for h in hosts))
            assert {h.root for h in hosts} == {root}
        assert all(changes is not None for _, _, changes in first.log.commits[1:])
        assert "bad_bytes" not in first.log.names() + second.log.names()
        assert AUTHORITY.public
