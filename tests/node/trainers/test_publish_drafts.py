"""A policy and its draft model as one version, over a real Unix socket, to a seed whose nodes are a second replica."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_kit import BASE, adapter, base_weights
from seed_kit import FakeSeed, random_replica, running

from codec import Layout, Replica, TensorSpec, write_checkpoint
from codec.adapter import AdapterSlots
from codec.errors import UsageError
from codec.parts import BASE as BASE_PART
from codec.parts import DRAFT, Part, draft_blocks, draft_name, extended
from node import Swarm
from node.trainers.publish_files import publish_folder

torch.set_num_threads(1)

HEAD = Layout((TensorSpec("fc.weight", "BF16", (32, 64)), TensorSpec("layers.0.up.weight", "BF16", (48, 32))))


def draft_weights(version: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(version)
    return {
        tensor.name: torch.randn(tensor.shape, generator=random).to(torch.bfloat16)
        for tensor in HEAD.tensors
    }  # fmt: skip


def drafted_seed(slots: int = 0) -> FakeSeed:
    """A seed with a base and a draft model of zeros, and perhaps slots for adapters."""
    base = random_replica(BASE)
    room = AdapterSlots.reserve(BASE, slots, 8) if slots else None
    replica = Replica.create(extended(BASE, room, HEAD))
    for block in range(BASE.n_blocks):
        replica._writable(block)[:] = base.block(block)
    replica.rehash()
    return FakeSeed(replica)


def words(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)


def assert_holds(seed: FakeSeed, base: dict[str, torch.Tensor], draft: dict[str, torch.Tensor] | None) -> None:
    """The nodes hold these bits (`draft` None: zeros) and the root of the seed."""
    assert seed.receiver.rehash() == []
    assert seed.receiver.root == seed.replica.root
    for name, tensor in base.items():
        assert np.array_equal(seed.receiver.bits(name), words(tensor)), name
    for spec in HEAD.tensors:
        held = seed.receiver.bits(draft_name(spec.name))
        want = np.zeros(spec.elements, np.uint16) if draft is None else words(draft[spec.name])
        assert np.array_equal(held, want), spec.name


@pytest.mark.parametrize("slots", [0, 2])
def test_both_become_one_version_and_a_publish_without_leaves_the_draft(tmp_path: Path, slots: int) -> None:
    with running(tmp_path, drafted_seed(slots)) as there, Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        seed = there.seed
        first = swarm.publish(base_weights(1), step=1, draft=draft_weights(1)).wait(timeout_s=30)
        assert (first.version, first.root) == (1, seed.replica.root)
        assert_holds(seed, base_weights(1), draft_weights(1))
        assert seed.sealed_parts[-1] == {BASE_PART, DRAFT}
        # The second is copied before the first is sealed, and must not bring back the draft that was before it.
        both = swarm.publish(base_weights(2), step=2, draft=draft_weights(2))
        swarm.publish(base_weights(3), step=3).wait(timeout_s=30)
        both.wait(timeout_s=30)
        assert_holds(seed, base_weights(3), draft_weights(2))
        assert seed.sealed_parts[-1] == {BASE_PART}
        only = swarm.publish(base_weights(3), step=4, draft=draft_weights(4)).wait(timeout_s=30)
        assert only.changed
        assert only.changed <= sum(spec.elements for spec in HEAD.tensors)
        assert_holds(seed, base_weights(3), draft_weights(4))
        assert swarm.layout == BASE


def test_adapters_go_on_beside_a_draft(tmp_path: Path) -> None:
    with running(tmp_path, drafted_seed(2)) as there, Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        swarm.publish(adapter(1), step=1, adapter="a").wait(timeout_s=30)
        assert there.seed.sealed_parts[-1] == {Part.adapter(0)}
        swarm.publish(base_weights(1), step=2, draft=draft_weights(1)).wait(timeout_s=30)
        assert_holds(there.seed, base_weights(1), draft_weights(1))


def test_going_back_brings_the_draft_back(tmp_path: Path) -> None:
    with running(tmp_path, drafted_seed()) as there, Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        first = swarm.publish(base_weights(1), step=1, draft=draft_weights(1)).wait(timeout_s=30)
        assert first.root is not None
        swarm.publish(base_weights(2), step=2, draft=draft_weights(2)).wait(timeout_s=30)
        assert swarm.resume(first.root) == (1, 1)
        assert_holds(there.seed, base_weights(1), draft_weights(1))
        third = swarm.publish(base_weights(3), step=3, draft=draft_weights(3)).wait(timeout_s=30)
        assert third.error is None
        assert swarm.resume(first.root, base_weights(1), draft=draft_weights(1)) == (2, 1)
        assert_holds(there.seed, base_weights(1), draft_weights(1))


def test_the_nodes_go_back_only_with_the_draft_of_that_version(tmp_path: Path) -> None:
    with running(tmp_path, drafted_seed()) as there, Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        first = swarm.publish(base_weights(1), step=1, draft=draft_weights(1)).wait(timeout_s=30)
        assert first.root is not None
        swarm.publish(base_weights(2), step=2, draft=draft_weights(2)).wait(timeout_s=30)
        with pytest.raises(UsageError, match="These weights are not those of version"):
            swarm.resume(first.root, base_weights(1))
        assert_holds(there.seed, base_weights(2), draft_weights(2))


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ({"other.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}, "a tensor other.weight of shape .* draft lacks"),
        ({"fc.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}, r"fc.weight of shape \(2, 2\), which .* \(32, 64\)"),
        ({"fc.weight": draft_weights(0)["fc.weight"]}, "The draft model lacks layers.0.up.weight"),
    ],
)
def test_a_draft_of_another_layout_is_refused(tmp_path: Path, draft: Any, says: str) -> None:
    with running(tmp_path, drafted_seed()) as there, Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        with pytest.raises(UsageError, match=says):
            swarm.publish(base_weights(1), step=1, draft=draft)
        swarm.publish(base_weights(2), step=2).wait(timeout_s=30)
        assert_holds(there.seed, base_weights(2), None)


def test_a_swarm_without_a_draft_refuses_one(tmp_path: Path) -> None:
    with running(tmp_path, FakeSeed(random_replica(BASE))), Swarm.attach(base_weights(0), home=tmp_path) as swarm:
        with pytest.raises(UsageError, match="carries no draft model"):
            swarm.publish(base_weights(1), step=1, draft=draft_weights(1))
        with pytest.raises(UsageError, match="publish the draft model with the base"):
            swarm.publish(adapter(1), step=1, adapter="a", draft=draft_weights(1))


def saved(folder: Path, layout: Layout, tensors: dict[str, torch.Tensor]) -> Path:
    write_checkpoint(folder, layout, lambda name: words(tensors[name]), {"config.json": b"{}"})
    return folder


def test_folders_of_both(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with running(home, drafted_seed()) as there:
        base = saved(tmp_path / "base", BASE, base_weights(1))
        draft = saved(tmp_path / "draft", HEAD, draft_weights(1))
        report = publish_folder(home, base, draft=draft)
        assert report["version"] == 1
        assert bytes.fromhex(report["root"]) == there.seed.replica.root
        assert_holds(there.seed, base_weights(1), draft_weights(1))
        report = publish_folder(home, saved(tmp_path / "next", BASE, base_weights(2)))
        assert report["version"] == 2
        assert_holds(there.seed, base_weights(2), draft_weights(1))
        with pytest.raises(UsageError, match=r"another model than the seed.s draft model: embed\.weight is"):
            publish_folder(home, base, draft=base)
        assert draft_blocks(there.seed.replica.layout)
