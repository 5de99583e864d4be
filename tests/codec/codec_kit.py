"""Small models and training steps for the tests in this folder."""

from typing import Any

import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from codec.bits import DTYPES, Bits, DType
from codec.chunk import Chunk, ChunkHeader, ChunkKey, open_header, seal_chunk, verify_piece
from codec.layout import BLOCK_ELEMENTS, Layout, TensorSpec
from codec.pack import Packer
from codec.replica import Replica
from codec.sign import Key

CODED = [name for name, dtype in DTYPES.items() if dtype.itemsize < 8]
KEY = Key(bytes(range(32)))

LAYOUT = Layout(
    (
        TensorSpec("a.bias", "F32", (37,)),
        TensorSpec("b.weight", "BF16", (1111, 1003)),
        TensorSpec("c.empty", "BF16", (0, 5)),
        TensorSpec("d.scalar", "F32", ()),
        TensorSpec("e.fp8", "F8_E4M3", (129,)),
        TensorSpec("f.steps", "I64", (3,)),
        TensorSpec("model.embed_tokens.weight", "BF16", (70, 64), ("lm_head.weight",)),
    )
)
"""All unusual shapes in one layout: two blocks, an empty tensor, a scalar, tied weights."""


def at_least(examples: int) -> int:
    """For `max_examples`: this number, or that of the hypothesis profile if it is larger (`make fuzz`)."""
    return max(examples, settings.default.max_examples)


def bits_of(*fields: tuple[int, int]) -> bytes:
    """A payload with a class top of 127, followed by (value, width) fields, least significant bit first."""
    word = at = 0
    for value, width in fields:
        word |= value << at
        at += width
    return b"\x7f" + word.to_bytes(-(-at // 8), "little")


def random_bits(rng: np.random.Generator, n: int, dtype: DType) -> Bits:
    """Random bit patterns, which include NaNs, infinities, both zeros and denormals."""
    return rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(dtype.bits)


def sprinkled(rng: np.random.Generator, old: Bits, density: float, dtype: DType) -> Bits:
    """`old` with a share of its elements replaced by random patterns."""
    return np.where(rng.random(old.size) < density, random_bits(rng, old.size, dtype), old)


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, as torch does."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def rl_step(n: int, update: float = 2.4e-7, seed: int = 0) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """bf16 bits before and after a small update of fp32 masters: about 1 % of them change."""
    rng = np.random.default_rng(seed)
    master = (rng.standard_normal(n) * 0.02).astype(np.float32)
    return bf16(master), bf16(master - (update * rng.standard_normal(n)).astype(np.float32))


def weights(layout: Layout = LAYOUT, seed: int = 0) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    return {
        tensor.name: bf16(rng.standard_normal(tensor.elements) * 0.02)
        if tensor.dtype == "BF16"
        else random_bits(rng, tensor.elements, tensor.type)
        for tensor in layout.tensors
    }


def stepped(before: dict[str, Bits], density: float = 0.01, seed: int = 1) -> dict[str, Bits]:
    """Change a share of the elements by one unit in the last place; every tensor that is not empty changes."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, bits in before.items():
        flips = rng.random(bits.size) < density
        flips[:1] = True
        after[name] = bits ^ flips.astype(bits.dtype)
    return after


def replica_of(bits: dict[str, Bits], layout: Layout = LAYOUT) -> Replica:
    replica = Replica.create(layout)
    for block in range(layout.n_blocks):
        data = block_of(bits, layout, block)
        replica.write_block(block, data.tobytes(), hash_of(data))
    return replica


def hash_of(bits: Any) -> bytes:
    from blake3 import blake3

    return blake3(bits.tobytes()).digest()


def block_of(bits: dict[str, Bits], layout: Layout, block: int) -> Bits:
    spec = layout.block(block)
    return bits[spec.name][spec.start : spec.start + spec.count]


def publish(
    replica: Replica, after: dict[str, Bits], coder: int = 0, target_bytes: int = 4096, version: int = 1
) -> list[Chunk]:
    """Diff, pack and seal as a trainer does. The replica does not change."""
    chunks: list[Chunk] = []
    packer = Packer(target_bytes)
    full = []
    for block in range(replica.layout.n_blocks):
        delta = replica.encode_block(block, block_of(after, replica.layout, block), coder)
        full += packer.add(delta) if delta else []
    for deltas in full + packer.flush():
        key = ChunkKey(0, version, 0, len(chunks))
        chunks.append(seal_chunk(key, replica.root, replica.layout.hash, deltas, KEY))
    return chunks


def opened(chunk: Chunk) -> ChunkHeader:
    """Verify a chunk as a node does before it decodes it."""
    header = open_header(chunk.header, KEY.public)
    for index in range(header.n_pieces):
        span = header.piece_range(index)
        verify_piece(header, index, chunk.body[span.start : span.stop])
    return header


def differing(replica: Replica, bits: dict[str, Bits]) -> list[str]:
    return [name for name in bits if not np.array_equal(replica.bits(name), bits[name])]


assert LAYOUT.blocks_of("b.weight") == range(1, 3)
assert BLOCK_ELEMENTS == 1 << 20
