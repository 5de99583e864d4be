"""Bytes of catching up, counted at the members that send them: a small difference costs few bytes, and members send
them instead of the trainer."""

import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runtime_kit
import trio
from runtime_kit import CONFIG, Host, Swarm, new_replica, swarm, until

from codec import write_checkpoint
from codec.errors import UsageError
from swarm.protocol.core.events import VersionId
from swarm.protocol.core.tuning import Tuning
from swarm.store import Disk
from swarm.transport.memory import Link

BLOCKS, ELEMENTS = 100, 3000
BLOCK_BYTES = 2 * ELEMENTS
LIST_BYTES = 32 * BLOCKS
LAYOUT_BYTES_MOST = 60 * BLOCKS


@pytest.fixture(autouse=True)
def hundred_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a hundred small blocks, one tensor each."""
    tensors = tuple((f"layer.{i:03}", (ELEMENTS,)) for i in range(BLOCKS))
    monkeypatch.setattr(runtime_kit, "LAYOUT_TENSORS", tensors)


def folder(path: Path, differing: int) -> Path:
    """The base with this many blocks changed."""
    replica = new_replica()
    other = {f"layer.{i * BLOCKS // differing:03}" for i in range(differing)}

    def bits(name: str) -> np.ndarray:
        words = replica.bits(name).copy()
        if name in other:
            words[7] ^= 1
        return words

    assert len(other) == differing
    write_checkpoint(path, replica.layout, bits, {"config.json": CONFIG})
    return path


def all_hold(hosts: list[Host], number: int) -> bool:
    return all(h.model is not None and h.model.version == VersionId(0, number) for h in hosts)


async def start_members(s: Swarm, count: int) -> list[Host]:
    """Start this many members, which hold the head."""
    hosts = [await s.start_member(n) for n in range(1, count + 1)]
    await until(lambda: all_hold(hosts, 0))
    return hosts


def bytes_given(hosts: list[Host]) -> int:
    return sum(host.runtime.counts.blobs for host in hosts)


async def test_a_folder_that_differs_in_three_percent_fetches_those_blocks_from_members(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with swarm(tmp_path) as s:
        hosts = await start_members(s, 2)
        before, trainer = bytes_given(hosts), s.authority.runtime.counts.blobs
        late = await s.start_member(9, base=folder(tmp_path / "base", 3))
        await until(lambda: all_hold([late], 0))
        assert late.root == s.authority.root
        fetched = bytes_given(hosts) - before
        least = 3 * BLOCK_BYTES + LIST_BYTES
        assert least <= fetched <= 1.05 * least + LAYOUT_BYTES_MOST + len(CONFIG)
        assert late.runtime.counts.received == fetched
        assert s.authority.runtime.counts.blobs == trainer


async def test_a_folder_that_is_the_head_costs_its_layout_only(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        hosts = await start_members(s, 1)
        before = bytes_given(hosts)
        late = await s.start_member(9, base=folder(tmp_path / "base", 0))
        await until(lambda: all_hold([late], 0))
        assert bytes_given(hosts) - before <= LAYOUT_BYTES_MOST + len(CONFIG)


@pytest.mark.slow
async def test_a_crowd_without_the_model_fetches_it_from_members(tmp_path: Path, autojump_clock: object) -> None:
    """Eight members at once: each fetches the model once, from two that have it and then from one another."""
    async with swarm(tmp_path, tuning=replace(Tuning.loopback(), stripes=2)) as s:
        hosts = await start_members(s, 2)
        before, trainer = bytes_given(hosts), s.authority.runtime.counts.blobs
        crowd = [await s.start_member(n) for n in range(10, 18)]
        await until(lambda: all_hold(crowd, 0))
        assert {host.root for host in crowd} == {s.authority.root}
        whole = BLOCKS * BLOCK_BYTES + LIST_BYTES
        assert 8 * whole <= bytes_given([*hosts, *crowd]) - before <= 1.05 * 8 * (whole + LAYOUT_BYTES_MOST)
        assert s.authority.runtime.counts.blobs == trainer


@pytest.mark.parametrize("lives", [3])
async def test_blocks_fetched_before_a_kill_are_not_fetched_again(
    tmp_path: Path, autojump_clock: object, lives: int
) -> None:
    async with swarm(tmp_path) as s:
        hosts = await start_members(s, 1)
        s.network._default = Link(rate_bytes_s=600_000)
        before = bytes_given(hosts) + bytes_given([s.authority])
        for _ in range(lives):
            late = await s.start_member(9)
            model = late.model
            assert model is not None
            await until(lambda model=model: len(model._labels) >= BLOCKS // (lives + 1))
            await s.stop(late)
        late = await s.start_member(9)
        await until(lambda: all_hold([late], 0))
        assert late.root == s.authority.root
        fetched = bytes_given(hosts) + bytes_given([s.authority]) - before
        most = BLOCKS * BLOCK_BYTES + (lives + 1) * (LIST_BYTES + LAYOUT_BYTES_MOST + len(CONFIG))
        in_flight = s.tuning.requests_in_flight * BLOCK_BYTES
        assert fetched <= most + lives * in_flight
        assert fetched < 2 * BLOCKS * BLOCK_BYTES, "a restart does not fetch all blocks again"


async def test_the_trainer_gives_at_most_its_cap_of_model_copies_and_members_pass_them_on(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with swarm(tmp_path, copies=1.2) as s:
        crowd = [await s.start_member(n) for n in range(1, 6)]
        await until(lambda: all_hold(crowd, 0), 300.0)
        model = s.authority.model
        assert model is not None
        assert model.layout is not None
        egress = s.authority.core.egress.status()
        assert s.authority.runtime.counts.blobs <= egress.model_sent_bytes
        assert egress.model_sent_bytes <= 1.2 * runtime_kit.model_bytes(model.layout)
        root = await s.publish(1)
        await until(lambda: all_hold(crowd, 1))
        assert {host.root for host in crowd} == {root}
        newest = s.authority.store.newest()
        assert newest is not None
        sent = s.authority.runtime.counts.pushed + s.authority.runtime.counts.pulled
        assert newest.payload_bytes <= sent <= 1.2 * newest.payload_bytes


class FullDisk:
    """A disk that refuses every write once it is full."""

    full = False

    def __call__(self, step: str, path: Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_member_with_a_full_disk_releases_its_lease_before_it_ends(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with swarm(tmp_path, tuning=replace(Tuning.wan(), stripes=2)) as s:
        disk = FullDisk()
        with pytest.RaisesGroup(UsageError, allow_unwrapped=True, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                s.nursery, mine = nursery, s.nursery
                member = await s.start_member(1, disk=Disk(disk))
                s.nursery = mine
                await until(lambda: all_hold([member], 0))
                disk.full = True
                await s.publish(1)
                await trio.sleep_forever()
        await until(lambda: "member_left" in s.authority.log.names(), 5.0)
        assert not s.authority.core.book.leases
        assert "lease_expired" not in s.authority.log.names()
