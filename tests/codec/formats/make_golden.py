"""Writes `golden/`: only when a format gets a new version, never to make a test pass.

python tests/codec/formats/make_golden.py
"""

import struct
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

from codec.bits import Bits  # noqa: E402
from codec.formats.part import FormatPart  # noqa: E402
from codec.formats.quantise import quantise  # noqa: E402
from codec.formats.spec import FORMATS, Format, Matrix, format_tensors  # noqa: E402
from codec.layout import Layout, TensorSpec  # noqa: E402
from codec.parts import extended  # noqa: E402

ROWS, COLUMNS = 130, 141
MODEL = Layout(
    (
        TensorSpec("model.embed_tokens.weight", "BF16", (40, 141), ("lm_head.weight",)),
        TensorSpec("model.layers.0.mlp.experts.down_proj", "BF16", (2, 10, 141)),
        TensorSpec("model.layers.0.mlp.gate.weight", "BF16", (2, 141)),
        TensorSpec("model.layers.0.mlp.up_proj.weight", "BF16", (30, 141)),
        TensorSpec("model.norm.weight", "BF16", (141,)),
    )
)
"""A model whose tensors have the first elements of `bits`, one after the other."""


def bits() -> np.ndarray:
    """Weights as policies have them, a part with every kind of bit pattern, ties, and a tile of zeros."""
    rng = np.random.default_rng(27)
    values = (rng.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    found = (values.view(np.uint32) >> 16).astype(np.uint16)
    found[3] = rng.integers(0, 1 << 16, COLUMNS)
    found[7] = 0
    found[9] = rng.choice([0x3F80, 0x3FC0, 0x4020, 0x4060, 0x40E0, 0xBF00, 0xBFC0, 0x8000], COLUMNS)
    return found.reshape(-1)


def model_part(form: Format) -> bytes:
    """The tensors of the format's part of `MODEL`, in the order of their names."""
    layout = extended(MODEL, formats=format_tensors(MODEL, form))
    sizes = [tensor.elements for tensor in MODEL.tensors]
    starts = {tensor.name: sum(sizes[:number]) for number, tensor in enumerate(MODEL.tensors)}
    every = bits()

    def read(name: str, start: int, count: int) -> Bits:
        return every[starts[name] + start :][:count]

    part, found = FormatPart(layout, form), dict[int, bytes]()
    for tensor in part.tensors:
        found |= {block.block: block.new.tobytes() for block in part.compute(tensor, read)}
    return b"".join(data for _, data in sorted(found.items()))


def main() -> None:
    folder = HERE / "golden"
    folder.mkdir(exist_ok=True)
    (folder / "bits").write_bytes(bits().astype("<u2").tobytes())
    for form in FORMATS.values():
        band = quantise(bits(), Matrix(1, ROWS, COLUMNS), form)
        codes, scales = band.codes.tobytes(), band.scales.tobytes()
        (folder / form.name).write_bytes(struct.pack("<I", len(codes)) + codes + scales)
        (folder / f"{form.name}.model").write_bytes(model_part(form))


if __name__ == "__main__":
    main()
