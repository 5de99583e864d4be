"""Members that hold a shard, in a swarm of the product's own runtimes: what they take, hold, prove and give."""

import os
from pathlib import Path

import numpy as np
import pytest
import runtime_kit
from blake3 import blake3
from runtime_kit import Host, Swarm, key, layout, swarm, until

from codec import Replica, write_checkpoint
from codec.shards import Parallel, Shard, block_ranks
from swarm.protocol.core.events import SendBlock, VersionId
from swarm.runtime.replica.model import Model
from swarm.runtime.replica.replay import Mismatch

EXPERTS = 8
TENSORS = (
    *((f"layers.0.experts.{expert}.w1.weight", (300, 200)) for expert in range(EXPERTS)),
    ("router.weight", (8, 200)),
    ("norm.weight", (200,)),
)


@pytest.fixture(autouse=True)
def mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit's model becomes a mixture of eight experts, each a block of 120 kB."""
    monkeypatch.setattr(runtime_kit, "LAYOUT_TENSORS", tuple(sorted(TENSORS)))


def held_by(shard: Shard) -> list[int]:
    return [int(block) for block in np.flatnonzero(shard.blocks(layout()))]


def check_replica(host: Host, seed: Host, shard: Shard) -> None:
    """It has exactly the blocks of the shard, with the seed's bits, and proves the seed's root."""
    assert host.root == seed.root
    assert host.model is not None
    assert seed.model is not None
    replica, whole = host.model.replica, seed.model.replica
    assert replica is not None
    assert whole is not None
    held = held_by(shard)
    for block in range(layout().n_blocks):
        if block in held:
            assert replica.read_block(block) == whole.read_block(block)
            assert blake3(replica.read_block(block)).digest() == replica.hashes[block].tobytes()
        else:
            assert not replica.block(block).any()
            assert host.model.read_block(block) is None
    assert np.array_equal(replica.hashes, whole.hashes)


def needed(host: Host, shard: Shard) -> tuple[int, int]:
    """(bytes of the bodies of all chunks in its store that the shard needs, those that it has)."""
    held = set(held_by(shard))
    chunks = host.store.chunks.all()
    wanted = [chunk for chunk in chunks if held & {entry.block for entry in chunk.header.blocks}]
    return sum(chunk.body_bytes for chunk in wanted), sum(chunk.body_bytes for chunk in chunks if chunk.have)


async def at_version(hosts: list[Host], number: int) -> None:
    await until(lambda: all(host.core.state.held == VersionId(0, number) for host in hosts))


async def publish_up_to(last: int, started: Swarm, hosts: list[Host]) -> None:
    """Publish versions 1 to `last`, each when these hosts hold the one before."""
    for number in range(1, last + 1):
        await started.publish(number)
        await at_version(hosts, number)


async def five(started: Swarm) -> tuple[list[Host], dict[int, Shard]]:
    shards = {3: Shard(4, (1,)), 4: Shard(4, (0, 2))}
    hosts = [await started.start_member(number) for number in (1, 2)]
    hosts += [await started.start_member(number, shard=shard) for number, shard in shards.items()]
    await at_version(hosts, 0)
    return hosts, shards


async def test_members_with_a_shard_take_only_its_chunks(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path, shards=4) as started:
        hosts, shards = await five(started)
        await publish_up_to(5, started, hosts)
        for host, shard in zip(hosts[2:], shards.values(), strict=True):
            check_replica(host, started.authority, shard)
            wanted, has = needed(host, shard)
            assert wanted == has > 0
            assert host.runtime.counts.stray == 0
            assert host.runtime.counts.duplicates < 5000
        assert hosts[0].root == hosts[1].root == started.authority.root
        classes = block_ranks(layout(), 4, Parallel.EXPERT)
        for chunk in started.authority.store.chunks.all():
            assert len({classes[entry.block] for entry in chunk.header.blocks}) == 1


async def test_blocks_that_are_not_held_take_no_memory(tmp_path: Path, autojump_clock: object) -> None:
    """They are holes, also after versions, a checkpoint and a restart; pages at the ends of blocks are shared."""
    async with swarm(tmp_path, shards=4) as started:
        hosts, shards = await five(started)
        await publish_up_to(5, started, hosts)
        await started.stop(hosts[2])
        hosts[2] = await started.start_member(3, shard=shards[3])
        await at_version(hosts, 5)
        for host, shard in zip(hosts[2:], shards.values(), strict=True):
            assert host.model is not None
            replica = host.model.replica
            assert isinstance(replica, Replica)
            assert replica.fd is not None
            held = held_by(shard)
            held_bytes = sum(layout().block(block).nbytes for block in held)
            assert os.fstat(replica.fd).st_blocks * 512 <= held_bytes + 8192 * (len(held) + 1)
            (saved, *_) = host.store.checkpoints.list()
            files = [path for path in saved.folder.iterdir() if path.suffix == ".safetensors"]
            assert sum(path.stat().st_blocks * 512 for path in files) <= held_bytes + 8192 * (len(held) + 2)


async def test_a_member_with_a_shard_is_a_leaf(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path, shards=4) as started:
        hosts, _ = await five(started)
        await publish_up_to(3, started, hosts)
        roster = started.authority.core.state.roster
        for number in (3, 4):
            member = roster.member_of(key(number).public)
            assert (member.leaf, member.up_mbit) == (True, 0.0)
            assert not any(roster.children(k, member.slot) for k in range(roster.stripes))


async def test_a_member_with_a_shard_restarts_from_its_disk(tmp_path: Path, autojump_clock: object) -> None:
    """Killed after two versions, it comes back to them by itself, and takes the chunks of the one that it missed."""
    async with swarm(tmp_path, shards=4) as started:
        hosts, shards = await five(started)
        for number in (1, 2):
            await started.publish(number)
            await at_version(hosts, number)
        await started.stop(hosts[2])
        await started.publish(3)
        await at_version([*hosts[:2], hosts[3]], 3)
        hosts[2] = await started.start_member(3, shard=shards[3])
        assert hosts[2].model is not None
        assert hosts[2].model.version == VersionId(0, 2)
        check = hosts[2].model.replica
        assert check is not None
        await at_version(hosts, 3)
        check_replica(hosts[2], started.authority, shards[3])
        assert "catchup" not in " ".join(hosts[2].log.names())
        await started.publish(4)
        await at_version(hosts, 4)
        check_replica(hosts[2], started.authority, shards[3])


async def test_a_member_joins_with_a_shard_while_versions_are_published(tmp_path: Path, autojump_clock: object) -> None:
    """More versions than are kept as chunks, so that blocks with several labels come."""
    shard = Shard(4, (3,))
    async with swarm(tmp_path, shards=4) as started:
        hosts = [await started.start_member(number) for number in (1, 2)]
        await at_version(hosts, 0)
        for number in range(1, 12):
            await started.publish(number)
        hosts.append(await started.start_member(3, shard=shard))
        for number in range(12, 15):
            await started.publish(number)
        await at_version(hosts, 14)
        check_replica(hosts[2], started.authority, shard)


async def test_a_member_with_a_shard_uses_the_folder_that_it_has(tmp_path: Path, autojump_clock: object) -> None:
    """It reads its blocks from a folder with the whole base, and fetches none."""
    shard = Shard(4, (2,))
    async with swarm(tmp_path, shards=4) as started:
        seed = started.authority
        assert seed.model is not None
        base = seed.model.replica
        assert isinstance(base, Replica)
        write_checkpoint(tmp_path / "base", layout(), base.bits, {"config.json": runtime_kit.CONFIG})
        await started.publish(1)
        host = await started.start_member(1, base=tmp_path / "base", shard=shard)
        await at_version([host], 1)
        check_replica(host, seed, shard)
        delta_bytes = sum(chunk.body_bytes for chunk in seed.store.chunks.all())
        assert host.runtime.counts.received < delta_bytes + 32 * layout().n_blocks + 10_000


async def test_a_damaged_block_of_a_shard_is_fetched_again(tmp_path: Path, autojump_clock: object) -> None:
    shard = Shard(4, (1,))
    async with swarm(tmp_path, shards=4) as started:
        hosts = [await started.start_member(1), await started.start_member(2, shard=shard)]
        await at_version(hosts, 0)
        assert hosts[1].model is not None
        replica = hosts[1].model.replica
        assert isinstance(replica, Replica)
        block = held_by(shard)[0]
        replica._writable(block)[5] ^= 1
        await started.publish(1)
        await at_version(hosts, 1)
        check_replica(hosts[1], started.authority, shard)
        assert "replica_damaged" in " ".join(hosts[1].log.names()) or "damaged" in " ".join(hosts[1].log.names())


async def test_a_whole_member_seals_no_version_without_a_body(tmp_path: Path, autojump_clock: object) -> None:
    """Even when its store says that a chunk's header is enough."""
    async with swarm(tmp_path, shards=4) as started:
        host = await started.start_member(1)
        await at_version([host], 0)
        await started.publish(1)
        await at_version([host], 1)
        assert host.model is not None
        manifest, sealed = host.runtime.manifests.get(VersionId(0, 1)) or (None, b"")
        assert manifest is not None
        seed = started.authority
        other = Model(host.store)
        replica = Replica.create(layout())
        before = runtime_kit.new_replica()
        for block in range(layout().n_blocks):
            replica.write_block(block, before.read_block(block), before.hashes[block].tobytes())
        other.adopt(replica, VersionId(0, 0))
        chunk = host.store.chunks.all()[0]
        chunk.bodiless, chunk.have = True, 0
        with pytest.raises(Mismatch, match="not in the store"):
            other.prepare(manifest, sealed)
        assert seed.root == manifest.root


async def test_chunks_that_are_cut_by_another_rule_are_taken_whole(tmp_path: Path, autojump_clock: object) -> None:
    """A seed that comes back without ranks, or with others, cuts chunks that mix classes: the member takes each that
    has a block of its own, and writes only its own blocks."""
    shard = Shard(4, (1,))
    async with swarm(tmp_path, shards=4) as started:
        hosts = [await started.start_member(1), await started.start_member(2, shard=shard)]
        await at_version(hosts, 0)
        for number, shards in enumerate((4, 0, 8, 3), 1):
            started.shards = shards
            await started.publish(number)
            await at_version(hosts, number)
            check_replica(hosts[1], started.authority, shard)
        await started.stop(hosts[1])
        started.shards = 4
        hosts[1] = await started.start_member(2, shard=shard)
        await at_version(hosts, 4)
        check_replica(hosts[1], started.authority, shard)


async def test_a_block_that_is_not_held_is_lacked(tmp_path: Path, autojump_clock: object) -> None:
    shard = Shard(4, (1,))
    async with swarm(tmp_path, shards=4) as started:
        hosts = [await started.start_member(1), await started.start_member(2, shard=shard)]
        await at_version(hosts, 0)
        blobs = hosts[1].runtime._blobs
        assert blobs is not None
        held = held_by(shard)
        for block in range(layout().n_blocks):
            found = await blobs.find_blob(SendBlock(key(1).public, 7, block))
            assert (found is not None) == (block in held)


async def test_a_swarm_without_ranks_refuses_a_shard(tmp_path: Path, autojump_clock: object) -> None:
    async with swarm(tmp_path) as started:
        host = await started.start_member(1, shard=Shard(4, (1,)))
        await until(lambda: "refused" in host.log.names())
        assert dict(host.log.events)["refused"]["code"] == "shard"
        assert host.core.state.grant is None
