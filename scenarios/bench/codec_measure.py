"""The measurement loop of the codec benchmark: times every coder, BLAKE3 and memcpy on the same bytes."""

import resource
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3

from codec import pco, rice
from codec.bits import Bits, DType
from codec.chunk import CODER_PCO, CODER_RICE, BlockDelta, BlockEntry, ChunkKey, open_header, seal_chunk, verify_piece
from codec.kernels.scan import scatter
from codec.layout import BLOCK_ELEMENTS
from codec.manifest import Manifest
from codec.pack import Packer, chunk_target, piece_target
from codec.sign import Key
from codec.staging import decode, encode
from node.tools.delta_baselines import BASELINES, Timed, seconds
from node.tools.delta_baselines import measure as measure_baseline
from scenarios.bench.codec_bounds import Bounds
from scenarios.bench.codec_data import Part

__all__ = ["Measurement", "measure", "scaling"]

_KEY: Final = Key(bytes(32))
_ROOT: Final = bytes(32)
_LONG_S: Final = 0.3
"""Duration of one run of threads: long compared with the time to start them."""


@dataclass
class Measurement:
    """Sums over all parts; seconds are measured as in `Timed`."""

    elements: int = 0
    changed: int = 0
    full_bytes: int = 0
    coders: dict[str, Timed] = field(default_factory=dict)
    blake3_s: float = 0.0
    memcpy_s: float = 0.0
    verify_s: float = 0.0
    scatter_s: float = 0.0
    pco_positions_s: float = 0.0
    chunks: int = 0
    peak_bytes: int = 0
    """Memory that the coders used beyond the data."""
    process_peak_bytes: int = 0
    """Peak memory of this process, libraries, compiler and data included."""
    bounds: Bounds = field(default_factory=Bounds)


def _anonymous_bytes() -> int:
    """Return the memory of this process without mapped files; 0 where /proc is missing."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    for line in status.read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class _Wire:
    """Packs one coder's deltas into real chunks, counts their bytes, and verifies them as a node does."""

    def __init__(self, measurement: Measurement, timed: Timed, expected: int, repeats: int) -> None:
        self._measurement, self._timed, self._repeats = measurement, timed, repeats
        self._packer = Packer(chunk_target(expected))
        self._piece_bytes = piece_target(expected)
        self._ids: list[bytes] = []

    def add(self, delta: BlockDelta) -> None:
        for deltas in self._packer.add(delta):
            self._seal(deltas)

    def finish(self) -> None:
        for deltas in self._packer.flush():
            self._seal(deltas)
        manifest = Manifest(_KEY.public, 0, 1, 0, _ROOT, _ROOT, _ROOT, tuple(self._ids), 0, 0).seal(_KEY)
        self._timed.payload_bytes += len(manifest)

    def _seal(self, deltas: list[BlockDelta]) -> None:
        key = ChunkKey(0, 1, 0, len(self._ids))
        spent, chunk = seconds(self._repeats, lambda: seal_chunk(key, _ROOT, _ROOT, deltas, _KEY, self._piece_bytes))
        self._timed.encode_s += spent

        def verify() -> None:
            header = open_header(chunk.header, _KEY.public)
            for piece in range(header.n_pieces):
                span = header.piece_range(piece)
                verify_piece(header, piece, chunk.body[span.start : span.stop])

        spent, _ = seconds(self._repeats, verify)
        self._timed.decode_s += spent
        self._timed.payload_bytes += chunk.nbytes
        self._ids.append(chunk.id)
        self._measurement.chunks = max(self._measurement.chunks, len(self._ids))


def _ours(
    found: Measurement, name: str, block: int, old: Bits, new: Bits, dtype: DType, repeats: int, wire: _Wire
) -> None:
    """Time one block in one of our coders: encode and hash; decode, predict the hash and scatter."""
    timed = found.coders[name]
    coder = CODER_RICE if name == "rice" else CODER_PCO
    spent, delta = seconds(repeats, lambda: encode(block, old, new, dtype, coder))
    timed.encode_s += spent
    if delta is None:
        return
    wire.add(delta)
    entry = BlockEntry(delta.block, delta.coder, delta.new_hash, len(delta.payload))
    payload = memoryview(delta.payload)
    spent, decoded = seconds(repeats, lambda: decode(entry, payload, old, dtype))
    timed.decode_s += spent
    if decoded is None:
        timed.exact = False
        return
    words = old.copy()
    spent, _ = seconds(repeats, lambda: scatter(words, *decoded))
    timed.decode_s += spent
    timed.exact &= np.array_equal(words, new)
    if name == "rice":
        found.scatter_s += spent
    elif delta.coder == CODER_PCO:
        found.pco_positions_s += seconds(repeats, lambda: pco.decode_block(delta.payload, old, dtype))[0]


def measure(
    parts: Iterable[Part], expected_bytes: int, repeats: int = 3, progress: Callable[[int], None] = lambda done: None
) -> Measurement:
    """Encode and decode every block of `parts` with every coder.

    `expected_bytes`: the expected payload, which determines the chunk size. `progress` is called with the number of
    elements done.
    """
    found = Measurement(coders={name: Timed() for name in ("rice", "pco", *BASELINES)})
    wires = {name: _Wire(found, found.coders[name], expected_bytes, repeats) for name in ("rice", "pco")}
    copy = np.empty(8 * BLOCK_ELEMENTS, np.uint8)
    Manifest(_KEY.public, 0, 1, 0, _ROOT, _ROOT, _ROOT, (), 0, 0).seal(_KEY)  # loads the signature library
    block = held = 0
    for part in parts:
        rice.warm_up(part.dtype)
        pco.warm_up(part.dtype)
        for name in BASELINES:
            measure_baseline(name, part.old[:64], part.new[:64], part.dtype, Timed())
        held = held or _anonymous_bytes()  # after compilers and libraries are loaded
        for start in range(0, part.old.size, BLOCK_ELEMENTS):
            old, new = part.old[start : start + BLOCK_ELEMENTS], part.new[start : start + BLOCK_ELEMENTS]
            raw = new.view(np.uint8)
            found.blake3_s += seconds(repeats, lambda raw=raw: blake3(raw.data).digest())[0]
            target = copy[: raw.size]
            found.memcpy_s += seconds(repeats, lambda target=target, raw=raw: np.copyto(target, raw))[0]
            for name in ("rice", "pco"):
                _ours(found, name, block, old, new, part.dtype, repeats, wires[name])
                if found.elements == 0:  # the first part only: later parts reuse its scratch memory
                    found.peak_bytes = max(found.peak_bytes, _anonymous_bytes() - held)
            found.changed += int(np.count_nonzero(old != new))
            block += 1
        for name in BASELINES:
            measure_baseline(name, part.old, part.new, part.dtype, found.coders[name], repeats)
        found.bounds.add(part.old, part.new, part.dtype)
        found.elements += part.old.size
        found.full_bytes += part.old.nbytes
        progress(found.elements)
    for wire in wires.values():
        wire.finish()
    found.process_peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def scaling(parts: list[Part], repeats: int = 5) -> dict[str, float]:
    """Return the wall-clock speedup of two threads over one for encoding, decoding, and BLAKE3 alone.

    Each thread cycles through all blocks until `_LONG_S` have passed. The jobs take turns and the best of `repeats`
    rounds counts, so that other load on the machine affects all jobs alike.
    """
    blocks = [
        (part.dtype, part.old[start : start + BLOCK_ELEMENTS], part.new[start : start + BLOCK_ELEMENTS])
        for part in parts
        for start in range(0, part.old.size, BLOCK_ELEMENTS)
    ]
    deltas = [encode(i, old, new, dtype) for i, (dtype, old, new) in enumerate(blocks)]

    def coded(i: int) -> object:
        dtype, old, new = blocks[i]
        return encode(i, old, new, dtype)

    def decoded(i: int) -> object:
        delta = deltas[i]
        if delta is None:
            return None
        entry = BlockEntry(delta.block, delta.coder, delta.new_hash, len(delta.payload))
        return decode(entry, memoryview(delta.payload), blocks[i][1], blocks[i][0])

    def hashed(i: int) -> object:
        return blake3(blocks[i][2].view(np.uint8).data).digest()

    def rate(work: Callable[[int], object], threads: int) -> float:
        """Return blocks per second of all threads together."""
        end = time.perf_counter() + _LONG_S
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(lambda worker: _rate(work, len(blocks), worker, end), range(threads)))

    jobs = {"encode": coded, "decode": decoded, "blake3": hashed}
    best = {(name, threads): 0.0 for name in jobs for threads in (1, 2)}
    for _ in range(repeats):
        for (name, threads), before in best.items():
            best[name, threads] = max(before, rate(jobs[name], threads))
    return {name: best[name, 2] / best[name, 1] for name in jobs}


def _rate(work: Callable[[int], object], blocks: int, first: int, end: float) -> float:
    """Return blocks per second of one thread that works until `end`."""
    done, start = 0, time.perf_counter()
    while (now := time.perf_counter()) < end:
        work((first + done) % blocks)
        done += 1
    return done / (now - start)
