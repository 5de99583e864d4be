"""A draft model in a swarm of real processes: its blocks reach every node, whatever its engine does with them."""

import json
import signal
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from kit import all_hold, check, holds
from memory_kit import step

from codec import Checkpoint, Layout, Replica, TensorSpec, write_checkpoint
from codec.parts import DRAFT, extended, part_root
from node.coordinator.draft import load_draft
from node.host.port import free_port
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, swarm_in

MODEL = Layout(tuple(TensorSpec(f"layers.{i}.up.weight", "BF16", (512, 256)) for i in range(3)))
HEAD = Layout((TensorSpec("fc.weight", "BF16", (256, 512)), TensorSpec("layers.0.up.weight", "BF16", (512, 256))))


def folder_of(folder: Path, layout: Layout, number: int, vocabulary: int = 512) -> Path:
    rng = np.random.default_rng(number)
    bits = {tensor.name: rng.integers(0, 1 << 16, tensor.elements, np.uint16) for tensor in layout.tensors}
    config = json.dumps({"model_type": "none", "vocab_size": vocabulary}).encode()
    write_checkpoint(folder, layout, bits.__getitem__, {"config.json": config})
    return folder


def replica_of(base: Path, draft: Path) -> Replica:
    """What every member of the swarm must hold."""
    target, head = Checkpoint.open(base), Checkpoint.open(draft)
    replica = Replica.create(extended(target.layout, draft=head.layout))
    replica.load(target)
    load_draft(replica, head)
    return replica


def roots(base: Path, draft: Path) -> tuple[str, str]:
    """(the root of the swarm, that of the draft), hex."""
    replica = replica_of(base, draft)
    return replica.root.hex(), part_root(replica.layout, replica.hashes, DRAFT).hex()


@pytest.mark.slow
def test_nodes_hold_the_draft_of_each_version(tmp_path: Path) -> None:
    base, draft = folder_of(tmp_path / "base", MODEL, 0), folder_of(tmp_path / "draft", HEAD, 0)
    with swarm_in(tmp_path / "swarm") as swarm:
        at = ("--listen", f"127.0.0.1:{free_port()}")
        swarm.seed(base, *at, "--draft", str(draft))
        ticket = swarm.ticket()
        swarm.node("box", ticket, "--model", str(base))
        swarm.node("bare", ticket)
        versions = [(base, draft)]
        bases = [step(base, tmp_path / "base_1", 1)]
        bases.append(step(bases[0], tmp_path / "base_2", 2))
        drafts = [step(draft, tmp_path / "draft_1", 1)]
        # Both; then the base alone, which the seed itself reads; then the draft with an unchanged base.
        versions += [(bases[0], drafts[0]), (bases[1], drafts[0]), (bases[1], step(draft, tmp_path / "draft_3", 3))]
        for number, (target, head) in enumerate(versions):
            if number:
                words = () if number == 2 else ("--draft", str(head))
                assert swarm.publish(target, *words, "--wait")["version"] == number
            root, draft_root = roots(target, head)
            state = swarm.until("seed", all_hold([0, number], 2))
            assert (state["root"], state["draft"]["root"]) == (root, draft_root)
            for name in ("box", "bare"):
                swarm.until(name, holds(root))
        assert swarm.seed_status().draft.versions == 2
        said = swarm.command("seed", "status").out
        assert "draft model: " in said
        assert draft_root[:12] in said

        other = swarm.command("seed", "publish", str(base), "--draft", str(base))
        check(other, 2, "another model than the seed's draft model: fc.weight is not in it")
        check(
            swarm.command("seed", "publish", str(base), "--draft", str(draft), "--raw"), 2, "--draft goes with the base"
        )

        swarm.signal("seed", signal.SIGKILL)
        refused = folder_of(tmp_path / "refused", MODEL, 5)
        check(
            swarm.command("seed", "seed", "--base", str(base), "--draft", str(refused), *at, *LOOPBACK), 2,
            "was started with another draft model than the one in .*refused",
        )  # fmt: skip
        swarm.seed(base, *at)
        swarm.node("late", ticket)
        swarm.until("late", holds(root))
        assert swarm.until("seed", all_hold([0, 3], 3))["draft"]["root"] == draft_root


@pytest.mark.slow
def test_what_a_seed_refuses(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", MODEL, 0)
    with swarm_in(tmp_path / "swarm") as swarm:

        def start(*words: str) -> object:
            return swarm.command("seed", "seed", "--base", str(base), *words, *LOOPBACK)

        large = folder_of(tmp_path / "large", HEAD, 1, vocabulary=1000)
        check(start("--draft", str(large)), 2, "has a vocabulary of 1,000 tokens and the base one of 512")
        (large / "config.json").unlink()
        check(start("--draft", str(large)), 2, "has no config.json")
        check(start("--draft", str(tmp_path / "nowhere")), 2, "nowhere")
        swarm.seed(base, "--listen", f"127.0.0.1:{free_port()}")
        swarm.signal("seed", signal.SIGKILL)
        draft = folder_of(tmp_path / "draft", HEAD, 0)
        check(start("--draft", str(draft)), 2, "was started without a draft model")


@pytest.mark.long
@pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")
def test_an_engine_without_drafts_follows_the_base(tmp_path: Path) -> None:
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    base, draft = tmp_path / "base", tmp_path / "draft"
    for folder, layers in ((base, 2), (draft, 1)):
        save_bf16(random_model(TinyRecipe(vocabulary=500, hidden=64, inner=96, layers=layers, seed=1)), folder)
    first, second = step(base, tmp_path / "base_1", 1), step(draft, tmp_path / "draft_1", 1)
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base, "--draft", str(draft))
        ticket = swarm.ticket()
        words = ("--device", "cpu", "--threads", "1", *LOOPBACK)
        swarm.start("ram", "join", ticket, "--replica", "ram", *words)
        swarm.start("disk", "join", ticket, "--replica", "disk", *words)
        for name in ("ram", "disk"):
            swarm.until(name, lambda state: state["nodes"][0]["engine"] is not None, STARTED_WITHIN_S)
        swarm.publish(first, "--draft", str(second), "--wait")
        root, draft_root = roots(first, second)
        base_root = Replica.from_checkpoint(Checkpoint.open(first)).root.hex()
        for name in ("ram", "disk"):
            swarm.until(name, lambda state: state["nodes"][0]["engine"] == [0, 1])
            own = swarm.own_status(name, prove=True)
            assert (own.root, own.live_root, own.live_proven) == (root, base_root, True)
            assert (own.draft.root, own.draft.loaded, own.draft.versions) == (draft_root, False, 1)
            swarm.until_logged(name, "the engine transformers does not propose tokens by one")
