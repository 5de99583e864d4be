"""A tensor's delta in the folders that slime, miles and SkyRL write for engines that share a disk with them.

Bytes, whatever the dtype, compressed by zstd: either new XOR old, or "overwrite": how many bytes changed (uint32),
their places (uint32 each), and their new values. As `slime/utils/disk_delta.py` of slime writes them at commit
624b824a, and miles' copy of it at 31f1ca96. SkyRL 0.4.0 has the XOR alone.
"""

import zlib

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec.errors import UsageError

__all__ = ["applied", "checksum"]


def applied(stored: NDArray[np.uint8], old: NDArray[np.uint8], encoding: str) -> NDArray[np.uint8]:
    """The new bytes of a tensor with the `old` ones. `stored`: as the file has it. `encoding`: "xor" or "overwrite".

    Raises `UsageError` when the delta is of a tensor of another size, or of another encoding.
    """
    import zstandard  # pyright: ignore[reportMissingImports]  # a dependency of slime

    data, most = stored.tobytes(), 4 + 5 * old.size
    wrong = UsageError(f"A tensor's delta ({encoding}) is not one of {old.size} bytes in a form that is known.")
    try:
        if zstandard.frame_content_size(data) > most:
            raise wrong
        raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(data, max_output_size=most), np.uint8)
    except zstandard.ZstdError as error:
        raise wrong from error
    if encoding == "xor" and raw.size == old.size:
        return old ^ raw
    count = int(raw[:4].view("<u4")[0]) if raw.size >= 4 else 0
    if encoding != "overwrite" or raw.size != 4 + 5 * count:
        raise wrong
    places, new = raw[4 : 4 + 4 * count].view("<u4"), old.copy()
    if count and places.max() >= old.size:
        raise wrong
    new[places] = raw[4 + 4 * count :]
    return new


def checksum(algorithm: str, data: NDArray[np.uint8]) -> str:
    """The checksum of a tensor's new bytes. Raises `UsageError` for an algorithm that is not one of slime's."""
    match algorithm:
        case "blake3":
            return blake3(data.data).hexdigest()
        case "adler32":
            return f"{zlib.adler32(data.data):08x}"
        case "xxh3-128":
            import xxhash  # pyright: ignore[reportMissingImports]  # a dependency of slime

            return xxhash.xxh3_128(data).hexdigest()
    raise UsageError(f"Checksums by {algorithm} are not known: set --update-weight-delta-checksum blake3.")
