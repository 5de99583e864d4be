"""Real nodes that hold a format: a seed, bf16 nodes and an int4 node in one swarm, and what each of them holds."""

import signal
from pathlib import Path

import numpy as np
import pytest
from kit import CONFIG, Words, all_hold, check, step

from codec import Checkpoint, FileSpec, Layout, TensorSpec, write_checkpoint
from codec.formats.quantise import quantise
from codec.formats.share import FormatShare
from codec.formats.spec import FORMATS, format_tensors, quantised
from codec.parts import extended
from node.host.endpoint import open_store
from node.settings.ticket import Ticket
from scenarios.harness.swarm import swarm_in

NAMES = ("int4-group-e8", "fp8-block")
BASE = (
    TensorSpec("model.embed_tokens.weight", "BF16", (100, 256)),
    *(TensorSpec(f"model.layers.{layer}.mlp.up_proj.weight", "BF16", (1200, 1024)) for layer in range(3)),
    TensorSpec("model.norm.weight", "BF16", (256,)),
)


def layout() -> Layout:
    from blake3 import blake3

    return Layout(BASE, (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),))


def first() -> Words:
    rng = np.random.default_rng(0)
    return [
        ((0.02 * rng.standard_normal(tensor.elements)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for tensor in BASE
    ]


def stepped(before: Words, seed: int) -> Words:
    """A step of flipped bits and, so that scales move too, some elements of another size."""
    after = step(before, seed)
    rng = np.random.default_rng(seed)
    for tensor in after:
        tensor[rng.choice(len(tensor), 5, replace=False)] += np.uint16(0x80)
    return after


def checkpoint(folder: Path, words: Words) -> Path:
    by_name = {spec.name: tensor for spec, tensor in zip(BASE, words, strict=True)}
    write_checkpoint(folder, layout(), by_name.__getitem__, {"config.json": CONFIG})
    return folder


def check_home(home: Path, authority: bytes, states: list[Words], form: str | None) -> None:
    """Its newest checkpoint has the bits that it holds, computed here from the trainer's, and holes elsewhere."""
    formats = [tensor for name in NAMES for tensor in format_tensors(layout(), FORMATS[name])]
    whole = extended(layout(), formats=formats)
    with open_store(home, authority) as store:
        for chunk in store.chunks.all() if form else ():
            names = {whole.block(entry.block).name for entry in chunk.header.blocks}
            mine = any(FormatShare(form).blocks(whole)[entry.block] for entry in chunk.header.blocks)
            assert (chunk.whole, chunk.bodiless) == (mine, not mine), names
        (saved, *_) = store.checkpoints.list()
        bits = Checkpoint.open(saved.folder, parts=True)
    words = dict(zip((spec.name for spec in BASE), states[saved.version.version], strict=True))
    expected = {}
    for name in NAMES:
        for tensor in quantised(layout(), FORMATS[name]):
            band = quantise(words[tensor.base.name], tensor.matrix, tensor.form)
            expected |= {tensor.codes.name: band.codes, tensor.scales.name: band.scales}
    held = FormatShare(form).blocks(whole) if form else None
    for spec in whole.tensors:
        block = whole.blocks_of(spec.name)[0]
        mine = held[block] if held is not None else not spec.name.startswith("~")
        wanted = words.get(spec.name, expected.get(spec.name))
        assert wanted is not None
        found = bits.bits(spec.name)
        assert np.array_equal(found, wanted.view(found.dtype) if mine else np.zeros_like(found)), spec.name


@pytest.mark.slow
def test_an_int4_node_and_bf16_nodes_live_in_one_swarm(tmp_path: Path) -> None:
    """Five versions; an int4 node joins after three of them. Each holds its bits, and none of the others'."""
    states = [first()]
    for number in range(1, 6):
        states.append(stepped(states[-1], number))
    with swarm_in(tmp_path) as swarm:
        formats = [word for name in NAMES for word in ("--format", name)]
        swarm.seed(checkpoint(tmp_path / "step_0", states[0]), *formats)
        ticket = swarm.ticket("--nodes", "5")
        swarm.node("bf16", ticket)
        swarm.node("int4", ticket, "--format", "int4-group-e8")
        swarm.until("seed", all_hold((0, 0), 2))
        assert {node.get("shard") for node in swarm.state("seed")["nodes"]} == {None, "int4-group-e8"}
        before = swarm.own_status("int4").received_bytes
        deltas = []
        for number in (1, 2, 3):
            deltas.append(swarm.publish(checkpoint(tmp_path / f"step_{number}", states[number]), "--wait"))
            swarm.until("seed", all_hold((0, number), 2))
        took = swarm.own_status("int4").received_bytes - before
        chunks = sum(delta["delta_bytes"] for delta in deltas)
        print(f"int4 received {took} of {chunks} bytes")

        swarm.node("late", ticket, "--format", "int4-group-e8")
        swarm.until("seed", all_hold((0, 3), 3))
        for number in (4, 5):
            swarm.publish(checkpoint(tmp_path / f"step_{number}", states[number]), "--wait")
            swarm.until("seed", all_hold((0, number), 3))
        root = swarm.state("seed")["root"]
        for name in ("bf16", "int4", "late"):
            swarm.until(name, lambda state: state["nodes"][0]["root"] == root)

        # A format that the swarm lacks, one that does not exist, and another share for the same home.
        join = ("join", ticket, "--engine", "none")
        check(swarm.command("no", *join, "--format", "int8-channel"), 2, "has fp8-block and int4-group-e8, not")
        check(swarm.command("no2", *join, "--format", "int3"), 2, "no format 'int3'")
        assert swarm.signal("int4", signal.SIGTERM) == 143
        check(swarm.command("int4", *join), 2, "holds the model in int4-group-e8", "--home")

        authority = Ticket.parse(ticket).authority
        for name in ("bf16", "late"):
            assert swarm.signal(name, signal.SIGTERM) == 143
        for name, form in (("bf16", None), ("int4", NAMES[0]), ("late", NAMES[0])):
            check_home(swarm.home(name), authority, states, form)
