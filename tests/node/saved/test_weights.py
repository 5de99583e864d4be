"""Weights from nodes, without a seed: several at once, and some that lie, lack blocks or hold an older version."""

import os
from pathlib import Path

import numpy as np
import pytest
import trio
from blake3 import blake3
from saved_kit import KEY, OTHER, Bench, as_kind, bench

from codec import Checkpoint, FileSpec, Layout, Manifest, TensorSpec, state_root
from codec.errors import UsageError
from codec.sign import Key
from node.saved import weights
from node.saved.conversation import Conversation
from node.saved.holder import Holder, ReplicaReader
from node.saved.messages import Body
from node.saved.rescue import Wanted, fetch_from_nodes
from node.saved.weights import FetchedWeights
from swarm.protocol.core.wire import Blob

CONFIG = b'{"model_type": "none"}'
TENSORS, ELEMENTS = 300, 5_000


class Model:
    """Made-up weights and a node's replica of them."""

    def __init__(self, version: int, key: Key = KEY) -> None:
        specs = tuple(TensorSpec(f"layer.{number:03}", "BF16", (ELEMENTS,)) for number in range(TENSORS))
        self.layout = Layout(specs, (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),))
        chance = np.random.default_rng(version)
        self.blocks = [chance.bytes(2 * ELEMENTS) for _ in range(TENSORS)]
        self.hashes = np.stack([np.frombuffer(blake3(block).digest(), np.uint8) for block in self.blocks])
        self.root = state_root(self.layout.hash, self.hashes)
        manifest = Manifest(key.public, 0, version, 0, bytes(32), self.root, self.layout.hash, (b"c" * 32,), 1000, 10)
        self.sealed = manifest.seal(key)
        self.given = 0

    def reader(self, *, wrong: int = -1, lacks: int = -1, pause_s: float = 0.0) -> ReplicaReader:
        async def manifest() -> bytes:
            return self.sealed

        async def blob(kind: int, name: bytes) -> bytes | None:
            found = {
                (Blob.LAYOUT, self.layout.hash): self.layout.to_bytes(),
                (Blob.FILE, blake3(CONFIG).digest()): CONFIG,
                (Blob.HASHES, self.root): self.hashes.tobytes(),
            }
            return found.get((kind, name))

        async def block(root: bytes, number: int) -> bytes | None:
            await trio.sleep(pause_s)
            if root != self.root or number == lacks:
                return None
            self.given += 1
            return bytes(2 * ELEMENTS) if number == wrong else self.blocks[number]

        return ReplicaReader(manifest, blob, block)

    def assert_in(self, folder: Path) -> None:
        found = Checkpoint.open(folder)
        for number, spec in enumerate(self.layout.tensors):
            assert found.bits(spec.name).tobytes() == self.blocks[number]
        assert (folder / "config.json").read_bytes() == CONFIG


async def fetched(made: Bench, out: Path, key: Key = KEY) -> FetchedWeights:
    addresses = tuple(node.addrs[0] for node in made.nodes)
    found, _ = await fetch_from_nodes(key, addresses, Wanted(out, None), made.tell)
    assert found is not None
    return found


@pytest.mark.slow
async def test_blocks_come_from_all_nodes_at_once(tmp_path: Path) -> None:
    model = Model(3)
    async with bench(tmp_path, nodes=0) as made:
        for _ in range(6):
            await made.add_node(reader=model.reader())
        found = await fetched(made, tmp_path / "out")
        assert (found.version, found.root) == ((0, 3), model.root)
        model.assert_in(tmp_path / "out")
        assert model.given == TENSORS
        assert not any(name.startswith(".out") for name in os.listdir(tmp_path))


async def test_a_node_that_lies_or_lacks_a_block_is_replaced(tmp_path: Path) -> None:
    model = Model(3)
    async with bench(tmp_path, nodes=0) as made:
        await made.add_node(reader=model.reader(wrong=17))
        await made.add_node(reader=model.reader(lacks=99))
        await made.add_node(reader=model.reader(pause_s=0.002))
        await fetched(made, tmp_path / "out")
        model.assert_in(tmp_path / "out")


class Dripping(Holder):
    """Gives a byte now and then."""

    async def _give(self, conversation: Conversation, data: bytes | None) -> None:
        assert data is not None
        await conversation.send(Body(len(data)))
        while True:
            await conversation.send_part(b"x")
            await trio.sleep(0.05)


async def test_a_node_that_drips_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BLOCK_S", 1.0)
    monkeypatch.setattr(weights, "MIN_BYTES_S", 1e9)
    model = Model(3)
    async with bench(tmp_path, nodes=0) as made:
        await made.add_node(reader=model.reader(), wrap=as_kind(Dripping))
        await made.add_node(reader=model.reader())
        await fetched(made, tmp_path / "out")
        model.assert_in(tmp_path / "out")


async def test_the_newest_signed_version_counts(tmp_path: Path) -> None:
    old, new, foreign = Model(3), Model(4), Model(9, OTHER)
    async with bench(tmp_path, nodes=1) as made:
        for model in (old, new, foreign):
            await made.add_node(reader=model.reader())
        found = await fetched(made, tmp_path / "out")
        assert found.root == new.root
        assert (old.given, foreign.given) == (0, 0)
        new.assert_in(tmp_path / "out")


async def test_what_has_come_before_is_not_fetched_again(tmp_path: Path) -> None:
    model = Model(3)
    async with bench(tmp_path, nodes=0) as made:
        await made.add_node(reader=model.reader(wrong=200))
        with pytest.raises(UsageError, match="do not give the whole model"):
            await fetched(made, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        before, model.given = model.given - 1, 0
        await made.add_node(reader=model.reader())
        made.kill(made.nodes.pop(0))
        await fetched(made, tmp_path / "out")
        assert model.given == TENSORS - before
        model.assert_in(tmp_path / "out")


async def test_without_a_version_it_says_so(tmp_path: Path) -> None:
    async with bench(tmp_path, nodes=1) as made:
        with pytest.raises(UsageError, match="holds a version"):
            await fetched(made, tmp_path / "out")
