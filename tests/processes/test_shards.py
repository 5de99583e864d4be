"""Real nodes that hold the blocks of some ranks: what they receive against what `delta --shapes --shards` reckons."""

import signal
from functools import reduce
from operator import or_
from pathlib import Path

import numpy as np
import pytest
from kit import CONFIG, Words, all_hold, check, step, weights
from kit import checkpoint as plain_checkpoint

from codec import Checkpoint, FileSpec, Layout, state_root, write_checkpoint
from codec.shards import Parallel, Shard, block_ranks
from codec.staging import block_hash
from node.host.endpoint import open_store
from node.settings.ticket import Ticket
from node.tools.reckon import reckon
from node.tools.shapes import Kind, Shapes
from scenarios.harness.swarm import swarm_in

RANKS = 4
EXPERTS = 32
SHAPE = (384, 1024)
"""Two experts' changes fit into a chunk, so that chunks would mix ranks if they were not cut for them."""
DENSITY = 0.1
MIXTURE = Shapes(
    "a tiny mixture",
    (
        Kind("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", SHAPE, layers=2, experts=EXPERTS),
        Kind("model.layers.{layer}.self_attn.q_proj.weight", SHAPE, layers=2),
    ),
)
HELD = {"part": Shard(RANKS, (1,)), "parts": Shard(RANKS, (0, 3))}


def layout() -> Layout:
    from blake3 import blake3

    files = (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),)
    return Layout(MIXTURE.layout.tensors, files)


def checkpoint(folder: Path, words: Words) -> Path:
    by_name = {spec.name: tensor for spec, tensor in zip(layout().tensors, words, strict=True)}
    write_checkpoint(folder, layout(), by_name.__getitem__, {"config.json": CONFIG})
    return folder


def root_of(words: Words) -> str:
    hashes = np.frombuffer(b"".join(map(block_hash, words)), np.uint8).reshape(-1, 32)
    return state_root(layout().hash, hashes).hex()


def test_a_model_without_experts_has_no_ranks(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        folder = plain_checkpoint(tmp_path / "step_0", weights(2))
        check(swarm.command("seed", "seed", "--base", str(folder), "--shards", "4"), 2, "has none: leave it out")


@pytest.mark.slow
def test_nodes_with_a_shard_receive_what_is_reckoned(tmp_path: Path) -> None:
    """Four ranks, two whole nodes, two with a shard, of which one is killed in between. Five versions."""
    states = [weights(len(layout().tensors), SHAPE[0] * SHAPE[1])]
    for number in range(1, 6):
        states.append(step(states[-1], number, DENSITY))
    with swarm_in(tmp_path) as swarm:
        swarm.seed(checkpoint(tmp_path / "step_0", states[0]), "--shards", str(RANKS))
        ticket = swarm.ticket("--nodes", "5")
        for name in ("whole1", "whole2"):
            swarm.node(name, ticket)
        for name, shard in HELD.items():
            swarm.node(name, ticket, "--shard", str(shard))
        swarm.until("seed", all_hold((0, 0), 4))
        assert {node.get("shard") for node in swarm.state("seed")["nodes"]} == {None, *map(str, HELD.values())}
        before = {name: swarm.own_status(name).received_bytes for name in HELD}
        deltas = []
        for number in (1, 2, 3):
            deltas.append(swarm.publish(checkpoint(tmp_path / f"step_{number}", states[number]), "--wait"))
            swarm.until("seed", all_hold((0, number), 4))
        took = {name: swarm.own_status(name).received_bytes - before[name] for name in HELD}

        assert swarm.signal("part", signal.SIGKILL) == -9
        deltas.append(swarm.publish(checkpoint(tmp_path / "step_4", states[4])))
        swarm.node("part", ticket, "--shard", str(HELD["part"]))
        swarm.until("part", lambda state: state["nodes"][0]["root"] == root_of(states[4]))
        deltas.append(swarm.publish(checkpoint(tmp_path / "step_5", states[5]), "--wait"))
        swarm.until("seed", all_hold((0, 5), 4))
        for name in (*HELD, "whole1", "whole2"):
            state = swarm.until(name, lambda state: state["nodes"][0]["root"] == root_of(states[5]))
            assert state["nodes"][0].get("shard") == (str(HELD[name]) if name in HELD else None)

        # What one rank takes, by the reckoning: its own bytes as a share of a version, headers and seal included.
        share = reckon(MIXTURE, density=DENSITY, shards=RANKS)
        reckoned = share.shares[Parallel.EXPERT].delta_bytes / share.delta_bytes
        delta_bytes = sum(delta["delta_bytes"] for delta in deltas[:3])
        print(f"one rank: {took['part'] / delta_bytes:.3f} of {delta_bytes} bytes, reckoned {reckoned:.3f}")
        assert took["part"] <= 1.05 * reckoned * delta_bytes

        # The wrong home, the wrong division, and a rank that does not exist are refused with a sentence.
        check(swarm.command("whole1-again", "join", ticket, "--engine", "none", "--shard", "4/4"), 2, "0 to 3")
        check(swarm.command("other", "join", ticket, "--engine", "none", "--shard", "1/8"), 2, "deals experts over 4")
        assert swarm.signal("part", signal.SIGTERM) == 143
        check(swarm.command("part", "join", ticket, "--engine", "none"), 2, "holds the blocks of 1/4", "--home")

        authority = Ticket.parse(ticket).authority
        assert swarm.signal("parts", signal.SIGTERM) == 143
        for name, shard in HELD.items():
            check_home(swarm.home(name), authority, shard, states)


def check_home(home: Path, authority: bytes, shard: Shard, states: list[Words]) -> None:
    """Its chunks and its newest checkpoint have the bits of its ranks and no others."""
    mine = sum(1 << rank for rank in shard.ranks)
    ranks = block_ranks(layout(), RANKS, Parallel.EXPERT)
    with open_store(home, authority) as store:
        assert all(store.chunks.all())
        for chunk in store.chunks.all():
            needed = bool(reduce(or_, (ranks[entry.block] for entry in chunk.header.blocks)) & mine)
            assert (chunk.whole, chunk.bodiless) == (needed, not needed)
            assert len({ranks[entry.block] for entry in chunk.header.blocks}) == 1
        assert any(len(chunk.header.blocks) > 1 for chunk in store.chunks.all())
        (saved, *_) = store.checkpoints.list()
        bits = Checkpoint.open(saved.folder)
        for block, spec in enumerate(layout().tensors):
            wanted = states[saved.version.version][block]
            assert np.array_equal(bits.bits(spec.name), wanted if ranks[block] & mine else np.zeros_like(wanted))
