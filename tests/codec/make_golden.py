"""Writes `golden/`: only when the wire format gets a new version, never to make a test pass.

python tests/codec/make_golden.py
"""

import struct
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from codec_kit import KEY, bf16, block_of, random_bits, replica_of, sprinkled  # noqa: E402
from test_routes import skewed, uniform  # noqa: E402

from codec import values  # noqa: E402
from codec.bits import DTYPES, Bits  # noqa: E402
from codec.chunk import BlockDelta, ChunkKey, seal_chunk  # noqa: E402
from codec.layout import FileSpec, Layout, TensorSpec  # noqa: E402
from codec.manifest import Manifest  # noqa: E402
from codec.routes import RouteShape, encode_routes  # noqa: E402

LAYOUT = Layout(
    (
        TensorSpec("bool", "BOOL", (200,)),
        TensorSpec("e4m3", "F8_E4M3", (3, 211)),
        TensorSpec("e5m2", "F8_E5M2", (640,)),
        TensorSpec("empty", "BF16", (0,)),
        TensorSpec("f16", "F16", (1500,)),
        TensorSpec("f32", "F32", (700,)),
        TensorSpec("f64", "F64", (65,)),
        TensorSpec("i32", "I32", (300,)),
        TensorSpec("i64", "I64", (130,)),
        TensorSpec("policy", "BF16", (160, 129), ("tied",)),
        TensorSpec("random", "BF16", (1000,)),
        TensorSpec("rewritten", "BF16", (400,)),
        TensorSpec("scalar", "F32", ()),
        TensorSpec("tails", "BF16", (2000,)),
        TensorSpec("zeros", "BF16", (300,)),
    ),
    (FileSpec("config.json", 2, bytes(range(32))),),
)


def states() -> tuple[dict[str, Bits], dict[str, Bits]]:
    rng = np.random.default_rng(20)
    old = {tensor.name: random_bits(rng, tensor.elements, tensor.type) for tensor in LAYOUT.tensors}
    master = (rng.standard_normal(160 * 129) * 0.02).astype(np.float32)
    old["policy"] = bf16(master)
    old["tails"] = rng.integers(0x3F00, 0x4000, 2000).astype(np.uint16)
    old["zeros"] = np.zeros(300, np.uint16)
    new = {tensor.name: sprinkled(rng, old[tensor.name], 0.03, tensor.type) for tensor in LAYOUT.tensors}
    new["policy"] = bf16(master - (3e-6 * rng.standard_normal(master.size)).astype(np.float32))
    new["rewritten"] = random_bits(rng, 400, LAYOUT.tensor("rewritten").type)
    new["scalar"] = old["scalar"] + np.uint32(1)
    sizes = rng.integers(1, 4, 2000) * np.where(rng.random(2000) < 0.06, 5000, 1)  # a few outliers: exp-Golomb codes
    steps = sizes * rng.choice([-1, 1], 2000) * (rng.random(2000) < 0.3)
    new["tails"] = (old["tails"] + steps).astype(np.uint16)
    new["zeros"] = np.full(300, 0x8000, np.uint16)
    return old, new


def new_values(name: str) -> tuple[Bits, Bits]:
    """Weights, zeros and one value, between runs that are kept."""
    rng, dtype = np.random.default_rng(20), DTYPES[name]
    wide = (0.02 * rng.standard_normal(6000)).astype(np.float32)
    after = bf16(wide) if name == "BF16" else wide.view(np.uint32) & np.uint32(0xFFFFFF80)
    after[2000:3000] = 0
    after[4000:4300] = rng.choice(after[:3], 300)
    before = random_bits(rng, 6000, dtype)
    before[1000:1500], before[5000:] = after[1000:1500], after[5000:]
    return before, after


def main() -> None:
    old, new = states()
    folder = HERE / "golden"
    folder.mkdir(exist_ok=True)
    for coder, name in ((0, "rice"), (1, "pco")):
        replica = replica_of(old, LAYOUT)
        deltas = [replica.encode_block(i, block_of(new, LAYOUT, i), coder) for i in range(LAYOUT.n_blocks)]
        found: list[BlockDelta] = [delta for delta in deltas if delta]
        halves = (found[::2], found[1::2])
        chunks = [
            seal_chunk(ChunkKey(1, 300, 2, seq), replica.root, LAYOUT.hash, half, KEY, 16384 << seq)
            for seq, half in enumerate(halves)
        ]
        target = replica_of(new, LAYOUT)
        changed = sum(int((old[name_] != new[name_]).sum()) for name_ in old)
        manifest = Manifest(
            KEY.public, 1, 300, 2, replica.root, target.root, LAYOUT.hash, tuple(chunk.id for chunk in chunks),
            sum(chunk.nbytes for chunk in chunks), changed,
        )  # fmt: skip
        records = [(chunk.header, chunk.body) for chunk in chunks]
        packed = b"".join(struct.pack("<II", len(head), len(body)) + head + body for head, body in records)
        (folder / f"{name}.chunks").write_bytes(packed)
        (folder / f"{name}.manifest").write_bytes(manifest.seal(KEY))
    (folder / "layout").write_bytes(LAYOUT.to_bytes())
    (folder / "old").write_bytes(b"".join(old[tensor.name].tobytes() for tensor in LAYOUT.tensors))
    (folder / "new").write_bytes(b"".join(new[tensor.name].tobytes() for tensor in LAYOUT.tensors))
    shape = RouteShape(3, 4, 24)
    rng = np.random.default_rng(20)
    for name, ids in (("even", uniform(rng, 40, shape)), ("learned", skewed(rng, 90, shape, 2.0, 1.5))):
        (folder / f"routes.{name}").write_bytes(encode_routes(ids, 24))
        np.save(folder / f"routes.{name}.npy", np.sort(ids, -1).astype(np.uint16))
    for name in ("BF16", "F32"):
        before, after = new_values(name)
        payload = values.encode_block(before, after, DTYPES[name])
        assert payload is not None
        (folder / f"values.{name}").write_bytes(payload)
        np.save(folder / f"values.{name}.npy", np.stack([before, after]))


if __name__ == "__main__":
    main()
