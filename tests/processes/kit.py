"""Checkpoints for swarms of real processes, tickets, and conditions on what the processes report."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from codec import FileSpec, Layout, TensorSpec, write_checkpoint
from codec.replica import Replica
from codec.sign import Key
from node.settings.ticket import Ticket
from scenarios.harness.swarm import Ended, State
from swarm.protocol.core.documents import Capability, seal

CONFIG = b'{"model_type": "none"}'
Words = list[np.ndarray]


# ------------------------------------------------------------ checkpoints


def weights(tensors: int = 24, elements: int = 60_000, seed: int = 0) -> Words:
    """The bf16 bits (uint16) of `tensors` tensors of one block each: normal values with a deviation of 0.02."""
    rng = np.random.default_rng(seed)
    return [
        ((0.02 * rng.standard_normal(elements)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for _ in range(tensors)
    ]


def step(before: Words, seed: int, density: float = 0.02) -> Words:
    """The weights after a training step: a share `density` of each tensor's elements has its lowest bit flipped."""
    rng = np.random.default_rng(seed)
    after = [tensor.copy() for tensor in before]
    for tensor in after:
        tensor[rng.choice(len(tensor), int(density * len(tensor)), replace=False)] ^= 1
    return after


def layout_of(words: Words) -> Layout:
    from blake3 import blake3

    tensors = tuple(TensorSpec(f"layer.{i:03}.weight", "BF16", (len(tensor),)) for i, tensor in enumerate(words))
    return Layout(tensors, (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),))


def checkpoint(folder: Path, words: Words) -> Path:
    """Write a Hugging Face folder with these bits; returns it."""
    layout = layout_of(words)
    by_name = {spec.name: tensor for spec, tensor in zip(layout.tensors, words, strict=True)}
    write_checkpoint(folder, layout, by_name.__getitem__, {"config.json": CONFIG})
    return folder


def root_of(words: Words) -> str:
    """The state root of these bits, in hex, computed in the test's own process."""
    layout = layout_of(words)
    replica = Replica.create(layout)
    from codec.staging import block_hash

    for block, tensor in enumerate(words):
        replica.write_block(block, tensor.tobytes(), block_hash(tensor))
    return replica.root.hex()


def ticket_of(key: Key, port: int, *, signer: Key | None = None, expires_s: float = 3600.0) -> str:
    """A ticket as `invite` prints it for the seed with this key at this port. `signer`: the key that signs it."""
    capability = Capability(key.public, os.urandom(16), time.time() + expires_s, 10, 0)
    return str(Ticket(key.public, (f"/ip4/127.0.0.1/tcp/{port}",), seal(capability, signer or key), "loopback"))


# ------------------------------------------------------------ conditions and checks


def holds(root: str) -> Callable[[State], bool]:
    """Condition on a node's own state: it holds these bits, and no version is on its way."""
    return lambda state: state["nodes"][0]["root"] == root and state["nodes"][0]["phase"] == "idle"


def all_hold(version: Sequence[int], members: int) -> Callable[[State], bool]:
    """Condition on a seed's state: it has this number of members, and each reported the whole version."""
    wanted = [(list(version), 1.0)] * members
    return lambda state: [(node["held"], node["catching_up"]) for node in state["nodes"]] == wanted


def check(ended: Ended, code: int, *patterns: str, within_s: float | None = None) -> None:
    """Assert that the command failed cleanly: exit code, a short message that matches the patterns, no traceback."""
    assert ended.code == code, ended
    assert "Traceback" not in ended.err, ended
    assert "This is a bug" not in ended.err, ended
    lines = ended.error_lines.splitlines()
    assert lines, ended
    assert lines[-1].startswith("swarm-node: "), ended
    assert len(lines[-1]) < 500, ended
    assert ended.out == "", ended
    for pattern in patterns:
        assert re.search(pattern, lines[-1]), (pattern, ended)
    if within_s is not None:
        assert ended.seconds < within_s, ended
