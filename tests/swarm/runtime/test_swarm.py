"""Seed and members over the memory transport: the product's cores, runtimes, stores and codec, on a virtual clock."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trio
from runtime_kit import CONFIG, Host, Killed, Swarm, new_replica, step, swarm, until

from codec import Checkpoint, write_checkpoint
from codec.errors import SwarmError
from node.coordinator.publisher import Publisher
from node.trainers.messages import VersionRef
from swarm.protocol.core.events import VersionId
from swarm.runtime import in_thread
from swarm.store import Disk
from swarm.transport.memory import Link, MemoryNetwork


def at(hosts: list[Host], number: int) -> bool:
    return all(h.model is not None and h.model.version == VersionId(0, number) for h in hosts)


async def follow(s: Swarm, hosts: list[Host], numbers: list[int]) -> None:
    """Publish these versions; after each, every member must have the trainer's bits."""
    for number in numbers:
        root = await s.publish(number)
        assert s.authority.root == root
        await until(lambda number=number: at(hosts, number))
        assert {h.root for h in hosts} == {root}
        for host in hosts:
            assert host.model is not None
            assert host.model.replica is not None
            assert host.model.replica.rehash() == []  # the hashes match the bits


async def test_members_catch_up_and_follow(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        hosts = [await s.start_member(1), await s.start_member(2)]
        await until(lambda: at(hosts, 0))
        assert {h.root for h in hosts} == {s.authority.root}
        await follow(s, hosts, [1, 2, 3])
        for host in hosts:
            assert [version for version, _, _ in host.log.commits] == [VersionId(0, n) for n in range(4)]
            assert all(changes is not None for _, _, changes in host.log.commits[1:])
            assert not {"bad_bytes", "damaged", "failed"} & set(host.log.names())
            assert (host.store.folder / "files").is_dir()
            assert host.store.file(s.authority.model.layout.files[0].hash) == CONFIG  # type: ignore[union-attr]


async def test_records_of_attempts_do_not_gather(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        for number in range(1, 6):
            await s.publish(number)
            assert list(s.authority.store.records.all("attempts/")) == [f"attempts/0.{number}"]


async def test_a_chunk_leaves_the_seed_once(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        hosts = [await s.start_member(n) for n in (1, 2, 3)]
        await until(lambda: at(hosts, 0))
        await follow(s, hosts, [1])  # from here on all may be interior
        await until(lambda: not any(member.leaf for member in s.authority.core.state.roster.members))
        await trio.sleep(1)
        before = s.authority.runtime.counts.pushed
        await follow(s, hosts, [2])
        payload = s.authority.store.newest()
        assert payload is not None
        sent = s.authority.runtime.counts.pushed - before + s.authority.runtime.counts.pulled
        assert payload.payload_bytes <= sent <= 1.05 * payload.payload_bytes


async def test_a_killed_member_replays_from_its_disk(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        hosts = [await s.start_member(1), await s.start_member(2)]
        await until(lambda: at(hosts, 0))
        await follow(s, hosts, [1, 2])
        await s.stop(hosts[1])
        await follow(s, hosts[:1], [3])
        back = await s.start_member(2)
        assert back.model is not None
        assert back.model.version == VersionId(0, 2)  # from checkpoint and chunks, without a request to any peer
        await until(lambda: at([back], 3))
        assert back.root == s.authority.root
        assert "catching_up" not in back.log.names()


async def test_a_late_joiner_with_an_old_folder_fetches_only_different_blocks(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with swarm(tmp_path) as s:
        first = await s.start_member(1)
        await until(lambda: at([first], 0))
        await follow(s, [first], [1, 2])
        mine = new_replica()
        bits = mine.bits("b.weight").copy()
        bits[5] ^= 1
        base = tmp_path / "base"
        write_checkpoint(
            base, mine.layout, lambda name: bits if name == "b.weight" else mine.bits(name), {"config.json": CONFIG}
        )
        assert Checkpoint.open(base).layout.hash == mine.layout.hash
        before = s.authority.runtime.counts.blobs
        second = await s.start_member(2, base=base)
        await until(lambda: at([second], 2))
        assert second.root == s.authority.root
        assert s.authority.runtime.counts.blobs - before < 1000  # the layout, before there was a peer to ask
        await follow(s, [first, second], [3])


async def test_the_checkpoint_on_disk_can_be_loaded(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        first = await s.start_member(1)
        await until(lambda: at([first], 0))
        await follow(s, [first], [1, 2, 3, 4])
        await until(lambda: ("checkpointed", {"version": VersionId(0, 4)}) in first.log.events)
        (checkpoint,) = first.store.checkpoints.list()
        assert checkpoint.trusted
        loaded = Checkpoint.open(checkpoint.folder)
        assert first.model is not None
        assert first.model.replica is not None
        for name in loaded.names:
            assert np.array_equal(loaded.bits(name), first.model.replica.bits(name))
        assert loaded.files == {"config.json": CONFIG}


async def test_an_interrupted_publish_leaves_members_unharmed(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        first = await s.start_member(1)
        await until(lambda: at([first], 0))
        await follow(s, [first], [1])
        seed = s.authority.seed
        assert seed is not None
        publisher = Publisher(seed)
        await publisher.begin()
        await publisher.add(step(seed.replica, 99))
        assert publisher._open is not None
        for rest in publisher._open.packer.flush():
            await publisher._open.send(rest)
        await until(lambda: first.store.chunks.of(VersionId(0, 2)) != [])
        await s.stop(s.authority)

        again = await s.start_seed()
        assert again.model is not None
        assert again.model.version == VersionId(0, 1)
        await until(lambda: len(list(again.runtime.peers)) == 1)
        root = await s.publish(2)
        await until(lambda: at([first], 2))
        assert first.root == root
        seal = first.store.newest()
        assert seal is not None
        assert seal.attempt == 1
        assert {chunk.key.attempt for chunk in first.store.chunks.of(VersionId(0, 2))} == {1}


async def test_a_rollback_reaches_all_members_and_one_that_was_away(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        hosts = [await s.start_member(1), await s.start_member(2)]
        relay = await s.start_member(3, relay=True)
        await until(lambda: at(hosts, 0))
        await follow(s, hosts, [1, 2])
        root_2 = s.authority.root
        await follow(s, hosts, [3])
        await s.stop(hosts[1])
        await follow(s, hosts[:1], [4])
        seed = s.authority.seed
        assert seed is not None
        publisher = Publisher(seed)
        gone_back = await publisher.go_back(VersionRef(version=2))
        assert gone_back[:3] == (1, 2, root_2)
        assert gone_back.payload_bytes > 0
        again = await publisher.go_back(VersionRef(root=root_2))
        assert again == (1, 2, root_2, 0), "it is the head already"
        back = VersionId(1, 2)
        await until(lambda: hosts[0].model is not None and hosts[0].model.version == back)
        assert hosts[0].root == root_2
        assert hosts[0].log.commits[-1][2] is not None, "as a patch, so that its engine continues"
        await until(lambda: back in [version for version, _, _ in relay.log.commits])

        root = await s.publish(5)
        assert seed.head == VersionId(1, 3)
        late = await s.start_member(2)  # at version 0.3 of a past epoch
        for host in (hosts[0], late):
            await until(lambda host=host: host.model is not None and host.model.version == VersionId(1, 3))
            assert host.root == root == s.authority.root
            assert host.model is not None
            assert host.model.replica is not None
            assert host.model.replica.rehash() == []
            assert not {"bad_bytes", "equivocation", "failed"} & set(host.log.names())

        await s.stop(s.authority)
        restarted = await s.start_seed()
        assert restarted.model is not None
        assert restarted.model.version == VersionId(1, 3)
        assert restarted.root == root


async def test_a_relay_passes_on_without_a_model(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        relay = await s.start_member(1, relay=True)
        member = await s.start_member(2)
        await until(lambda: at([member], 0))
        for number in (1, 2, 3):
            await follow(s, [member], [number])
        await until(lambda: VersionId(0, 3) in [version for version, _, _ in relay.log.commits])
        assert relay.store.chunks.of(VersionId(0, 3))


async def test_leaving_frees_the_slot_at_once(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        first = await s.start_member(1)
        await until(lambda: at([first], 0))
        await first.runtime.leave()
        await until(lambda: "member_left" in s.authority.log.names(), 2.0)
        assert not s.authority.core.book.leases


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_members_come_and_go(tmp_path: Path, autojump_clock: object, seed: int) -> None:
    rng = np.random.default_rng(seed)
    async with swarm(tmp_path) as s:
        hosts = {n: await s.start_member(n) for n in (1, 2, 3)}
        await until(lambda: at(list(hosts.values()), 0))
        for number in range(1, 7):
            gone = int(rng.integers(1, 4))
            if gone in hosts:
                await s.stop(hosts.pop(gone))
            root = await s.publish(number)
            await until(lambda number=number: at(list(hosts.values()), number))
            assert {h.root for h in hosts.values()} <= {root}
            if gone not in hosts:
                hosts[gone] = await s.start_member(gone)
        await until(lambda: at(list(hosts.values()), 6))
        assert {h.root for h in hosts.values()} == {s.authority.root}


async def test_with_real_threads_on_a_real_clock(tmp_path: Path) -> None:
    async with swarm(tmp_path, run_sync=in_thread) as s:
        hosts = [await s.start_member(1), await s.start_member(2)]
        await until(lambda: at(hosts, 0))
        await follow(s, hosts, [1, 2])


async def test_a_joiner_during_steps_ends_with_the_same_bits(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        s.network = MemoryNetwork(Link(delay_s=0.02, rate_bytes_s=200_000))  # a copy of the model takes over a second
        await s.stop(s.authority)
        await s.start_seed()
        first = await s.start_member(1)
        await until(lambda: at([first], 0))
        late = await s.start_member(2)
        for number in range(1, 6):
            await s.publish(number)
            await trio.sleep(0.7)
        await until(lambda: at([first, late], 5))
        assert {first.root, late.root} == {s.authority.root}
        assert late.model is not None
        assert late.model.replica is not None
        assert late.model.replica.rehash() == []


async def test_a_killed_joiner_keeps_the_blocks_that_it_fetched(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as s:
        first = await s.start_member(1)
        await until(lambda: at([first], 0))
        s.network._default = Link(rate_bytes_s=200_000)
        late = await s.start_member(2)
        model = late.model
        assert model is not None
        await until(lambda: len(model._labels) == 1)
        await s.stop(late)
        before = first.runtime.counts.blobs + s.authority.runtime.counts.blobs
        back = await s.start_member(2)
        await until(lambda: at([back], 0))
        assert back.root == s.authority.root
        whole = s.authority.model.layout.full_bytes  # type: ignore[union-attr]
        assert (
            first.runtime.counts.blobs + s.authority.runtime.counts.blobs - before < whole - 100_000
        )  # blocks fetched before the kill are kept


@pytest.mark.parametrize(
    ("first", "stride"), [(0, 6), *(pytest.param(first, 6, marks=pytest.mark.slow) for first in range(1, 6))]
)
async def test_a_seed_killed_at_any_write_never_seals_a_version_twice(
    tmp_path: Path, autojump_clock: object, first: int, stride: int
) -> None:
    """The restarted seed publishes other bits. A member that saw a version must never see another one of its number."""
    async with swarm(tmp_path) as s:
        member = await s.start_member(1)
        await until(lambda: at([member], 0))
        number = 1
        for count in range(first, 60, stride):
            await s.stop(s.authority)
            fuse = Fuse()
            seed = await s.start_seed(Disk(fuse))
            fuse.left = count
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_publish_until_killed, s, 100 * number, fuse, nursery.cancel_scope)
                nursery.start_soon(_cancel_when, seed.stopped, nursery.cancel_scope)
            await s.stop(s.authority)
            again = await s.start_seed()
            held = again.model.version if again.model is not None else None
            assert held is not None
            number = held.version + 1
            root = await s.publish(100 * number + 7)
            await until(lambda number=number: at([member], number))
            assert member.root == root == s.authority.root
            number += 1
        assert "equivocation" not in member.log.names()
        assert number > 4


class Fuse:
    """Kills the process once, before the disk step that `left` counts down to."""

    left: int | None = None

    def __call__(self, step: str, path: Path) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == -1:
                raise Killed


async def _publish_until_killed(s: Swarm, seed: int, fuse: Fuse, scope: trio.CancelScope) -> None:
    try:
        await s.publish(seed)
    except Killed:
        pass
    except SwarmError:  # killed in the middle of a chunk: the waiting caller gets an error
        assert fuse.left is not None
        assert fuse.left < 0
    scope.cancel()


async def _cancel_when(stopped: trio.Event, scope: trio.CancelScope) -> None:
    await stopped.wait()
    scope.cancel()


def test_a_relay_loads_no_compiler() -> None:
    script = "import sys, swarm.runtime, swarm.store; assert 'numba' not in sys.modules, 'numba'"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
