"""What the tests of engines' live bits share: with the replica in the engine's memory, and with a format."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from codec import Checkpoint, Replica, state_root, write_checkpoint
from codec.bits import Bits
from codec.formats.quantise import bf16_of, dequantise, quantise
from codec.formats.spec import Format, FormatTensor, is_quantised
from codec.staging import block_hash
from scenarios.harness.swarm import State, Swarm


def step(before: Path, after: Path, seed: int) -> Path:
    """Write the checkpoint after a training step: the lowest bit of 1 % of the elements is flipped."""
    checkpoint, rng = Checkpoint.open(before), np.random.default_rng(seed)

    def bits(name: str) -> Bits:
        changed = checkpoint.bits(name).copy()
        changed[rng.choice(changed.size, max(1, changed.size // 100), replace=False)] ^= 1
        return changed

    write_checkpoint(after, checkpoint.layout, bits, checkpoint.files)
    return after


def root_of(folder: Path) -> str:
    return Replica.from_checkpoint(Checkpoint.open(folder)).root.hex()


def dequantised_root(folder: Path, form: Format) -> str:
    """The root of the bf16 bits that the codes of a checkpoint stand for, tensor by tensor. Each is one matrix, or one
    plane, of one block."""
    replica = Replica.from_checkpoint(Checkpoint.open(folder))
    hashes = replica.hashes.copy()
    for spec in replica.layout.tensors:
        if is_quantised(spec, form):
            tensor = FormatTensor(form, spec)
            band = quantise(replica.bits(spec.name), tensor.matrix, tensor.form)
            (block,) = replica.layout.blocks_of(spec.name)
            bits = bf16_of(dequantise(band, tensor.matrix, tensor.form))
            hashes[block] = np.frombuffer(block_hash(bits), np.uint8)
    return state_root(replica.layout.hash, hashes).hex()


def generates(version: int) -> Callable[[State], bool]:
    """Condition on a node's state: replica and engine are at the version."""
    return lambda state: state["nodes"][0]["held"] == state["nodes"][0].get("engine") == [0, version]


def prove(swarm: Swarm, name: str = "node") -> str:
    """The root of the engine's bits, which are those of its version."""
    own = swarm.own_status(name, prove=True)
    assert own.live_proven is True
    assert isinstance(own.live_root, str)
    return own.live_root


def reads(state: State) -> dict[str, int]:
    return state["nodes"][0]["live_reads"]


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def flip_bit(pid: int, wanted: bytes, at_byte: int) -> int:
    """Flip the lowest bit of a byte of `wanted` wherever a process has these bytes in memory of its own; returns in how
    many places."""
    found = 0
    maps = Path(f"/proc/{pid}/maps").read_text()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-p", maps, re.MULTILINE):
            memory.seek(int(start, 16))
            try:
                data = memory.read(int(end, 16) - int(start, 16))
            except OSError:
                continue
            at = data.find(wanted)
            while at >= 0:
                memory.seek(int(start, 16) + at + at_byte)
                memory.write(bytes([data[at + at_byte] ^ 1]))
                found, at = found + 1, data.find(wanted, at + 1)
    return found
