"""Carries any file through a swarm of its own. The file is the "model": tensors of its bytes, and one with its length.

    swarm-node seed --raw-mb 512               version 0 is an empty file that can grow to 512 MB
    swarm-node publish --raw FILE              FILE is the next version; unchanged blocks are not sent again
    swarm-node join TICKET --raw-out FILE      each version that arrives is written to FILE, whole

Everything else is as for a policy: signed chunks, trees, catch-up, and a root that proves the bits.
"""

import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from codec.bits import Bits
from codec.errors import UsageError
from codec.layout import Layout
from codec.replica import Replica

__all__ = ["LENGTH", "check_raw", "raw_content", "raw_parts", "write_raw", "write_raw_base"]

PART: Final = "file.bytes.{:04}"
LENGTH: Final = "file.length"
"""Name of the tensor with the length of the file."""
LEAST_PART_BYTES: Final = 64 << 10
PARTS: Final = 256
"""Tensors of a file, as a rule. An entirely new file is sent as whole blocks, and chunks are made of blocks. In
one tensor its blocks would have a megabyte each: too few for the stripes. So the base is divided as
`codec.chunk_target` divides a version of its size."""
BLOCK_BYTES: Final = 1 << 20
MAX_PARTS: Final = 4096
"""Larger files have larger parts, of several blocks, because the layout names each part."""


def write_raw_base(folder: Path, capacity_bytes: int) -> Path:
    """Write a checkpoint folder of an empty file that can grow to `capacity_bytes`. It is sparse: it takes no disk.

    An existing one is kept. Raises `UsageError` when that has another size, or the folder cannot be written.
    """
    path = folder / "model.safetensors"
    table: dict[str, Any] = {LENGTH: {"dtype": "I64", "shape": [], "data_offsets": [0, 8]}}
    usual_bytes = min(BLOCK_BYTES, -(-capacity_bytes // PARTS))
    part_bytes = max(LEAST_PART_BYTES, usual_bytes, -(-capacity_bytes // MAX_PARTS))
    for number, at in enumerate(range(0, capacity_bytes, part_bytes)):
        size = min(part_bytes, capacity_bytes - at)
        table[PART.format(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [8 + at, 8 + at + size]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    size = 8 + len(header) + 8 + capacity_bytes
    try:
        if path.is_file():
            if path.stat().st_size != size:
                raise UsageError(f"{folder.parent} was started with another --raw-mb. Keep that, or use another home.")
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        with fresh.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(size)
        fresh.rename(path)
    except OSError as error:
        raise UsageError(f"Cannot write {folder}: {error.strerror}.") from error
    return folder


def check_raw(layout: Layout) -> int:
    """How many bytes a file may have in the swarm of this layout. Raises `UsageError` when it carries a policy."""
    return sum(raw_parts(layout).values())


def raw_parts(layout: Layout) -> dict[str, int]:
    """The bytes of each part, by name, in the order of the file. Raises `UsageError`."""
    specs = {spec.name: spec for spec in layout.tensors}
    names = [PART.format(number) for number in range(len(specs) - 1)]
    if (
        specs.keys() != {LENGTH, *names}
        or specs[LENGTH].dtype != "I64"
        or any(specs[name].dtype != "U8" for name in names)
    ):
        raise UsageError("This swarm carries a policy, not files. For files, begin one: swarm-node seed --raw-mb 512")
    return {name: specs[name].elements for name in names}


def raw_content(replica: Replica) -> Bits:
    """A copy of the file that `replica` holds, uint8. Raises `UsageError` when it holds a policy."""
    parts = raw_parts(replica.layout)
    content = np.empty(min(int(replica.bits(LENGTH)[0]), sum(parts.values())), np.uint8)
    at = 0
    for name, size in parts.items():
        if at >= len(content):
            break
        content[at : at + size] = replica.bits(name)[: len(content) - at]
        at += size
    return content


def write_raw(content: Bits, out: Path) -> None:
    """Write a file's bytes to `out`, whole or not at all. Raises `OSError`."""
    fresh = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        with fresh.open("wb") as stream:
            stream.write(content.data)
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)
