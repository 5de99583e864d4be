"""Writes `golden/`: only when a format gets a new version, never to make a test pass.

python tests/codec/formats/make_golden.py
"""

import struct
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

from codec.formats.quantise import quantise  # noqa: E402
from codec.formats.spec import FORMATS, Matrix  # noqa: E402

ROWS, COLUMNS = 130, 141


def bits() -> np.ndarray:
    """Weights as policies have them, a part with every kind of bit pattern, ties, and a tile of zeros."""
    rng = np.random.default_rng(27)
    values = (rng.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    found = (values.view(np.uint32) >> 16).astype(np.uint16)
    found[3] = rng.integers(0, 1 << 16, COLUMNS)
    found[7] = 0
    found[9] = rng.choice([0x3F80, 0x3FC0, 0x4020, 0x4060, 0x40E0, 0xBF00, 0xBFC0, 0x8000], COLUMNS)
    return found.reshape(-1)


def main() -> None:
    folder = HERE / "golden"
    folder.mkdir(exist_ok=True)
    (folder / "bits").write_bytes(bits().astype("<u2").tobytes())
    for form in FORMATS.values():
        band = quantise(bits(), Matrix(1, ROWS, COLUMNS), form)
        codes, scales = band.codes.tobytes(), band.scales.tobytes()
        (folder / form.name).write_bytes(struct.pack("<I", len(codes)) + codes + scales)


if __name__ == "__main__":
    main()
