"""Real processes with slots for adapters: restarts, late joiners, replicas on disk, and empty slots."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from kit import all_hold, check, holds

from codec import BlockDelta, Checkpoint, Layout, TensorSpec, state_root, write_checkpoint
from codec.adapter import AdapterConfig, AdapterModule
from codec.checkpoint import PARTS_FILE
from node.host.port import free_port
from node.ipc.channel import Channel
from node.trainers.connection.link import Link, RankInfo
from node.trainers.connection.seedlink import expect
from node.trainers.messages import Delta, PublishBegin, PublishBlocks, PublishEnd, PublishOpened, PublishSealed
from scenarios.harness.swarm import Swarm, swarm_in

CONFIG = b'{"model_type": "none"}'
SLOTS = ("--adapters", "64", "--adapter-rank", "256")
MODEL = Layout(tuple(TensorSpec(f"layers.{i}.up.weight", "BF16", (512, 512)) for i in range(4)))


def base_of(folder: Path, number: int) -> Path:
    rng = np.random.default_rng(number)
    bits = {tensor.name: rng.integers(0, 1 << 16, tensor.elements, np.uint16) for tensor in MODEL.tensors}
    write_checkpoint(folder, MODEL, bits.__getitem__, {"config.json": CONFIG})
    return folder


class SlotTrainer(Link):
    """Publishes a slot's blocks, as a trainer of an adapter does, with the plain messages."""

    def __init__(self, home: Path, name: str = "math") -> None:
        super().__init__(RankInfo(home, os.urandom(16), adapter=name))

    def publish(self, config: AdapterConfig) -> str:
        """Write the configuration, and change an element in a thousand of the weights. Returns the version's root."""
        channel: Channel = self.channel
        channel.send(PublishBegin(1, 1))
        opened: PublishOpened = expect(channel, PublishOpened)[0]
        assert opened.parent == self.root
        hashes, deltas = self.hashes.copy(), list[BlockDelta]()
        for block in range(self.replica.layout.n_blocks):
            new = self.replica.block(block).copy()
            if block == 0:
                new[:] = np.frombuffer(config.to_bytes(), np.uint8)
            else:
                new[::1000] += 1
            delta = self.replica.encode_block(block, new)
            assert delta is not None
            hashes[block] = np.frombuffer(delta.new_hash, np.uint8)
            deltas.append(delta)
        channel.send(PublishBlocks(tuple(Delta(d.block, d.coder, d.new_hash, bytes(d.payload)) for d in deltas)))
        root = state_root(self.replica.layout.hash, hashes)
        channel.send(PublishEnd(1, ((0, len(hashes)),), root))
        sealed: PublishSealed = expect(channel, PublishSealed)[0]
        assert sealed.root == root
        self.note_sealed(opened.epoch, opened.version, sealed, hashes)
        return sealed.swarm_root.hex()


def config_of(base: Path, version: int) -> AdapterConfig:
    hash_ = Checkpoint.open(base).layout.hash
    return AdapterConfig("math", hash_, 8, 16.0, (AdapterModule("layers.0.up", 8),), {}, version)


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(pid)


def equal(swarm: Swarm, names: list[str], version: int, root: str) -> None:
    assert swarm.until("seed", all_hold([0, version], len(names)))["root"] == root
    for name in names:
        swarm.until(name, holds(root))


@pytest.mark.slow
def test_slots_over_versions_restarts_and_late_joiners(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        base, at = base_of(tmp_path / "base", 0), ("--listen", f"127.0.0.1:{free_port()}")
        swarm.seed(base, *at, *SLOTS)
        ticket = swarm.ticket("--nodes", "5")
        swarm.node("ram", ticket, "--model", str(base))
        swarm.node("disk", ticket, "--replica", "disk")
        swarm.until("seed", all_hold([0, 0], 2))
        trainer = SlotTrainer(swarm.home("seed"))
        equal(swarm, ["ram", "disk"], 1, trainer.publish(config_of(base, 1)))
        held = swarm.seed_status().parts
        assert (held.slots, held.slots_free, held.slot_rank) == (64, 63, 256)
        assert [(one.slot, one.name, one.rank, one.version) for one in held.adapters] == [(0, "math", 8, 1)]
        assert held.adapters[0].root == trainer.root.hex()
        assert "63 of 64 slots for adapters of rank 256 are free" in swarm.command("seed", "status").out

        swarm.publish(base_of(tmp_path / "step_1", 1), "--wait")
        root = trainer.publish(config_of(base, 2))
        equal(swarm, ["ram", "disk"], 3, root)
        trainer.close()

        for name in ("ram", "disk", "seed"):
            swarm.signal(name, signal.SIGTERM)
        swarm.seed(base, *at)  # the home has its slots
        swarm.node("ram", ticket)
        swarm.node("disk", ticket, "--replica", "disk")
        swarm.node("late", ticket)
        equal(swarm, ["ram", "disk", "late"], 3, root)
        # The base and a slot are 4.3 MB; a busy machine's givers may send part of it twice.
        assert swarm.own_status("late").received_bytes < 8e6, "the base and one slot of 64, of 2 MB each"
        assert resident_mb(swarm.running["late"].pid) < 40

        trainer = SlotTrainer(swarm.home("seed"))
        equal(swarm, ["ram", "disk", "late"], 4, trainer.publish(config_of(base, 3)))
        trainer.close()
        stored_parts = list(tmp_path.glob(f"*/**/{PARTS_FILE}"))
        assert stored_parts
        for stored in stored_parts:
            assert stored.stat().st_blocks * 512 < 4e6, "empty slots are holes of a checkpoint"


@pytest.mark.slow
def test_a_member_without_a_replica_relays_versions_of_slots(tmp_path: Path) -> None:
    """It has neither base nor slots, only the chunks, of every part."""
    with swarm_in(tmp_path) as swarm:
        base = base_of(tmp_path / "base", 0)
        swarm.seed(base, *SLOTS)
        ticket = swarm.ticket("--nodes", "3")
        swarm.node("bare", ticket, "--replica", "none")
        for name in ("one", "two"):
            swarm.node(name, ticket, "--model", str(base))
        swarm.until("seed", all_hold([0, 0], 3))
        trainer = SlotTrainer(swarm.home("seed"))
        for version in range(1, 9):
            root = trainer.publish(config_of(base, version))
        trainer.close()
        swarm.publish(base_of(tmp_path / "step_1", 1), "--wait")
        said = swarm.command("seed", "remove-adapter", "math")
        assert said.code == 0, said
        root = swarm.state("seed")["root"]
        for name in ("one", "two"):
            swarm.until(name, holds(root))
        swarm.until("seed", all_hold([0, 10], 3))
        bare = swarm.own_status("bare")
        assert bare.received_bytes > MODEL.nbytes / 4, "the chunks of its stripes"
        assert bare.sent_bytes > 0
        check(swarm.command("other", "join", ticket, "--replica", "none"), 2, "add --engine none")


@pytest.mark.slow
def test_a_home_keeps_its_slots(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        base = base_of(tmp_path / "base", 0)
        swarm.seed(base, "--adapters", "2", "--adapter-rank", "8")
        swarm.signal("seed", signal.SIGTERM)
        words = ("seed", "--base", str(base))
        check(
            swarm.command("seed", *words, "--adapters", "3", "--adapter-rank", "8"),
            2, r"was started with 2 slots for adapters of rank 8, which cannot be changed",
        )  # fmt: skip
        check(swarm.command("seed", *words, "--adapters", "65"), 2, "1 to 64 slots")
        check(swarm.command("seed", *words, "--adapter-rank", "8"), 2, "only with --adapters")
        check(swarm.command("seed", "seed", "--raw-mb", "1", "--adapters", "2"), 2, "leave out --raw-mb")
        swarm.seed(base, "--adapters", "2", "--adapter-rank", "8")


@pytest.mark.parametrize("name", ["~adapter/00/config", "~x"])
def test_a_base_with_names_of_parts_is_refused(tmp_path: Path, name: str) -> None:
    layout = Layout((*MODEL.tensors, TensorSpec(name, "U8", (1 << 16,))))
    with swarm_in(tmp_path) as swarm:
        bits = {tensor.name: np.zeros(tensor.elements, tensor.type.bits) for tensor in layout.tensors}
        write_checkpoint(tmp_path / "base", layout, bits.__getitem__, {"config.json": CONFIG})
        # The folder's own writer keeps such tensors out of the weights, so they are put there by name.
        (tmp_path / "base" / PARTS_FILE).rename(tmp_path / "base" / "other.safetensors")
        (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "weights.safetensors")
        words = ("seed", "--base", str(tmp_path / "base"), "--adapters", "2")
        check(swarm.command("seed", *words), 2, "'~'.*rename|rename.*'~'")
