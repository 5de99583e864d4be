"""Compares what `swarm-node delta --shapes` reckons with a step of a smaller model that is really coded.

    python -m scenarios.bench.reckoned                                      all models, at 1/1000
    python -m scenarios.bench.reckoned --shapes kimi-k2 --scale 1000        one of them: three minutes
    python -m scenarios.bench.reckoned --shapes qwen3-1.7b --scale 1        the whole model

At 1/1000 every kind of tensor has a thousandth of its elements, in rows of the same length. Every block of a made-up
step of that model is coded, packed, signed and listed in a manifest. Its bytes are compared with those reckoned for the
small model, and with a thousandth of those reckoned for the whole model. The step has another random seed than the
samples of the reckoning. The density of both is the one that was asked for; the made-up step meets it within a few
percent.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from codec.chunk import ChunkKey, seal_chunk
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS
from codec.manifest import Manifest
from codec.pack import Packer, chunk_target, piece_target
from codec.sign import Key
from codec.staging import encode
from node.tools.reckon import DENSITY, reckon
from node.tools.shapes import Shapes, shape_names, shapes_of
from node.tools.table import bytes_text
from scenarios.bench.codec_data import Part, fabricate_shapes

__all__ = ["coded", "compare", "main"]

AGREE: Final = 0.10
"""The largest difference of reckoned and coded bytes that counts as agreement."""
_SEED: Final = 1
"""Of the made-up step; the reckoning samples with seed 0."""
_KEY: Final = Key(bytes(32))
_ROOT: Final = bytes(32)


def coded(parts: Iterator[Part], expected_bytes: int) -> tuple[int, int, int]:
    """Code every block of a step. Returns (bytes on the wire, changed elements, elements)."""
    packer, piece_bytes = Packer(chunk_target(expected_bytes)), piece_target(expected_bytes)
    ids: list[bytes] = []
    nbytes = changed = elements = block = 0

    def seal(full: list[Any]) -> None:
        nonlocal nbytes
        for deltas in full:
            chunk = seal_chunk(ChunkKey(0, 1, 0, len(ids)), _ROOT, _ROOT, deltas, _KEY, piece_bytes)
            nbytes += chunk.nbytes
            ids.append(chunk.id)

    for part in parts:
        changed += int(np.count_nonzero(part.old != part.new))
        elements += part.old.size
        for start in range(0, part.old.size, BLOCK_ELEMENTS):
            piece = slice(start, start + BLOCK_ELEMENTS)
            delta = encode(block, part.old[piece], part.new[piece], part.dtype)
            seal(packer.add(delta) if delta else [])
            block += 1
    seal(packer.flush())
    manifest = Manifest(_KEY.public, 0, 1, 0, _ROOT, _ROOT, _ROOT, tuple(ids), nbytes, changed).seal(_KEY)
    return nbytes + len(manifest), changed, elements


def compare(shapes: Shapes, scale: int, density: float) -> dict[str, Any]:
    """The row of one model."""
    small = shapes.scaled(scale) if scale > 1 else shapes
    expected = reckon(small, density=density)
    nbytes, changed, elements = coded(fabricate_shapes(small, density, _SEED), expected.delta_bytes)
    whole = reckon(shapes, density=density).delta_bytes
    return {
        "shapes": shapes.title,
        "scale": scale,
        "elements": elements,
        "density": changed / elements,
        "coded_bytes": nbytes,
        "coded_bits_per_change": 8 * nbytes / changed,
        "reckoned_bytes": expected.delta_bytes,
        "reckoned_bits_per_change": expected.bits_per_change,
        "reckoned_by_coded": expected.delta_bytes / nbytes,
        "whole_reckoned_bytes": whole,
        "whole_by_coded": whole / scale / nbytes,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=shape_names(), action="append", help="(may be repeated; default all)")
    parser.add_argument("--scale", type=int, default=1000, help="code a model this many times smaller (default 1000)")
    parser.add_argument("--density", type=float, default=DENSITY, help=f"(default {DENSITY})")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.shapes or shape_names():
        print(f"{name} at 1/{options.scale}", file=sys.stderr)
        rows.append(compare(shapes_of(name), options.scale, options.density))
    if options.json:
        print(json.dumps({"scenario": "reckoned", "rows": rows}, indent=1))
    for row in () if options.json else rows:
        print(
            f"{row['shapes']}: a step of 1/{row['scale']}, {row['elements']:,} elements, {row['density']:.2%} changed, "
            f"coded: {bytes_text(row['coded_bytes'])}, {row['coded_bits_per_change']:.2f} bits a change; reckoned "
            f"{row['reckoned_by_coded']:.3f} x that; the whole, {bytes_text(row['whole_reckoned_bytes'])}, divided by "
            f"{row['scale']}: {row['whole_by_coded']:.3f} x"
        )
    worst = max(abs(row[key] - 1) for row in rows for key in ("reckoned_by_coded", "whole_by_coded"))
    return 0 if worst <= AGREE else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(str(error))
