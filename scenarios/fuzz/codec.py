"""Mutates payloads and chunks, and checks that no decoder crashes, hangs, writes out of bounds or accepts a forgery.

    python -m scenarios.fuzz.codec --n 1000000 [--seed 0] [--json]

It covers every dtype, blocks of one to a few thousand elements, and changes from sparse to dense. Mutations flip bits,
set, cut, repeat and insert bytes, splice another payload, or are random bytes. A mutated payload may decode to other
changes, since only hashes detect that, but its positions must be increasing and within the block, and guard elements
around the output must stay untouched. A mutated chunk must be refused by signature, piece hash or block hash.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from codec import pco, rice, values
from codec.bits import DTYPES, Bits, DType
from codec.chunk import Chunk, ChunkKey, open_header, seal_chunk, verify_piece
from codec.errors import SwarmError
from codec.layout import Layout, TensorSpec
from codec.replica import Replica
from codec.routes import RouteShape, decode_routes, encode_routes
from codec.sign import Key
from codec.staging import StagedChunk, block_hash
from scenarios.harness.command import json_parser

__all__ = ["FuzzResult", "fuzz_chunks", "fuzz_payloads", "fuzz_routes", "main"]

_GUARD = 64
_SLOWEST_S = 2.0
"""CPU time of this thread that counts as a hang; a few thousand elements decode in microseconds."""


@dataclass
class FuzzResult:
    """The outcomes of the mutations. `decoded`: decoded within bounds; a hash would refuse these."""

    cases: int = 0
    refused: int = 0
    decoded: int = 0
    slowest_s: float = 0.0


@dataclass(frozen=True)
class _Sample:
    dtype: DType
    old: Bits
    payload: bytes


def _random(rng: np.random.Generator, n: int, dtype: DType) -> Bits:
    return rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(dtype.bits)


def _step(rng: np.random.Generator, n: int, dtype: DType) -> tuple[Bits, Bits]:
    """Return old and new bits: random patterns, or a few exponents and small steps as in weights."""
    old = _random(rng, n, dtype)
    if rng.random() < 0.7 and dtype.exponent_shift is not None:
        low = (1 << dtype.exponent_shift) - 1
        exponents = rng.integers(2, 12, n) << dtype.exponent_shift
        old = (old & dtype.bits.type(low)) | exponents.astype(dtype.bits)
    steps = rng.integers(-3, 4, n) * (rng.random(n) < rng.choice([0.003, 0.03, 0.3, 1]))
    return old, (old.astype(np.int64) + steps).astype(dtype.bits)


def _fresh(rng: np.random.Generator, n: int, dtype: DType) -> tuple[Bits, Bits]:
    """Return old bits, and new values with runs that keep the old ones: of few patterns, or with few exponents."""
    old, new = _step(rng, n, dtype)
    if rng.random() < 0.5:
        new = rng.choice(new[:8], n)
    kept = np.repeat(rng.random(-(-n // 60)) < rng.choice([0, 0.5, 0.9]), 60)[:n]
    return old, np.where(kept, old, new)


_CODERS = {
    "rice": (_step, rice.encode_block),
    "pco": (_step, pco.encode_block),
    "values": (_fresh, values.encode_block),
}


def _samples(coder: str, rng: np.random.Generator, count: int = 40) -> list[_Sample]:
    make, encode = _CODERS[coder]
    found: list[_Sample] = []
    names = sorted(name for name, dtype in DTYPES.items() if coder != "values" or dtype.itemsize < 8)
    while len(found) < count:
        dtype = DTYPES[names[len(found) % len(names)]]
        old, new = make(rng, int(rng.integers(1, 5000)), dtype)
        payload = encode(old, new, dtype)
        if payload is not None:
            found.append(_Sample(dtype, old, payload))
    return found


def _mutated(data: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """Apply one to four mutations."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        kind = int(rng.integers(0, 8))
        at = int(rng.integers(0, len(out) + 1))
        # Half of all mutations are near the front, where the counts and parameters are.
        at = at % 16 if rng.random() < 0.5 else at
        end = min(len(out), at + int(rng.integers(1, 33)))
        if kind <= 1 and at < len(out):
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 2 and at < len(out):
            out[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == 3:
            del out[at:end]
        elif kind == 4:
            out[at:at] = out[at:end]
        elif kind == 5:
            out[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 6:
            out[at:] = other[at:]
        elif kind == 7:
            out = bytearray(rng.bytes(int(rng.integers(0, 400)))) if rng.random() < 0.2 else out[: at + 1]
    return bytes(out)


def _decode(coder: str, sample: _Sample, payload: bytes) -> tuple[np.ndarray, Bits]:
    """The positions of the changes and the new bits; rice and values decode onto a copy with guard elements on both
    sides."""
    if coder == "pco":
        return pco.decode_block(payload, sample.old, sample.dtype)
    n = sample.old.size
    guarded = np.full(n + 2 * _GUARD, 0x5A, sample.dtype.bits)
    inside = guarded[_GUARD : _GUARD + n]
    try:
        if coder == "values":
            inside[:] = sample.old
            values.decode_onto(payload, inside, sample.dtype)
            positions, bits = np.arange(n), inside.copy()
        else:
            positions, bits = rice.decode_onto(payload, sample.old, inside, sample.dtype)
    finally:
        outside = np.concatenate([guarded[:_GUARD], guarded[_GUARD + n :]])
        assert np.all(outside == 0x5A), "wrote outside the block"
    expected = sample.old.copy()
    expected[positions] = bits
    assert np.array_equal(expected, inside), "positions and copy differ"
    return positions, bits


def fuzz_payloads(coder: str, n: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> FuzzResult:
    """Decode `n` mutated payloads of `coder` ("rice", "pco" or "values").

    Raises `AssertionError` when a property is violated.
    """
    rng = np.random.default_rng(seed)
    samples = _samples(coder, rng)
    for sample in samples:  # compile before anything is timed
        _decode(coder, sample, sample.payload)
    result = FuzzResult()
    for case in range(n):
        sample = samples[case % len(samples)]
        payload = _mutated(sample.payload, samples[int(rng.integers(0, len(samples)))].payload, rng)
        before = sample.old.copy()
        start = time.thread_time()
        try:
            positions, bits = _decode(coder, sample, payload)
        except SwarmError:
            result.refused += 1
        else:
            result.decoded += 1
            assert positions.size == bits.size > 0
            assert positions[-1] < sample.old.size
            assert np.all(positions[1:] > positions[:-1])
        result.slowest_s = max(result.slowest_s, time.thread_time() - start)
        assert np.array_equal(before, sample.old), "wrote to the old bits"
        result.cases += 1
        progress(case)
    assert result.slowest_s < _SLOWEST_S, f"a payload took {result.slowest_s:.1f} s"
    return result


def _chunks(rng: np.random.Generator) -> Iterator[tuple[Replica, Chunk, Key]]:
    """Yield chunks of a small model with several coders and dtypes, each with new contents."""
    layout = Layout(
        (TensorSpec("a", "BF16", (3000,)), TensorSpec("b", "F32", (200,)), TensorSpec("c", "F8_E4M3", (900,)))
    )
    key = Key(bytes(32))
    while True:
        replica = Replica.create(layout)
        deltas = []
        for block in range(layout.n_blocks):
            spec = layout.block(block)
            old, new = _step(rng, spec.count, spec.dtype)
            replica.write_block(block, old.tobytes(), block_hash(old))
            replica.base_values = rng.random() < 0.5
            delta = replica.encode_block(block, new, block % 3)
            deltas += [delta] if delta else []
        if deltas:
            yield replica, seal_chunk(ChunkKey(0, 1, 0, 0), replica.root, layout.hash, deltas, key), key


def _same(one: StagedChunk, other: StagedChunk) -> bool:
    return len(one.blocks) == len(other.blocks) and all(
        a.block == b.block and np.array_equal(a.positions, b.positions) and np.array_equal(a.bits, b.bits)
        for a, b in zip(one, other, strict=True)
    )


def fuzz_chunks(n: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> FuzzResult:
    """Verify and stage `n` mutated chunks as a node does. Raises `AssertionError` when one is accepted.

    Half are mutated after their pieces were verified, as by a fault in the node's memory, so that only the decoder and
    the block hashes protect the replica. A few of these decode, but to exactly the bits that were signed, because one
    change has more than one encoding.
    """
    rng = np.random.default_rng(seed)
    source = _chunks(rng)
    result = FuzzResult()
    replica, chunk, key = next(source)
    for case in range(n):
        if case % 200 == 199:
            replica, chunk, key = next(source)
        start = time.thread_time()
        header_bytes, body = chunk.header, chunk.body
        late = case % 2 == 1
        while header_bytes == chunk.header and body == chunk.body:
            if late or rng.random() < 0.7:
                body = _mutated(chunk.body, chunk.body[::-1], rng)
                body = (body + bytes(len(chunk.body)))[: len(chunk.body)] if late else body
            else:
                header_bytes = _mutated(chunk.header, chunk.header[::-1], rng)
        before = replica.root
        try:
            header = open_header(header_bytes, key.public)
            if not late:
                for piece in range(header.n_pieces):
                    span = header.piece_range(piece)
                    end = len(body) if piece == header.n_pieces - 1 else span.stop
                    verify_piece(header, piece, body[span.start : end])
            staged = replica.stage(header, body)
        except SwarmError:
            result.refused += 1
        else:
            assert late, "a mutated chunk was accepted"
            assert _same(staged, replica.stage(header, chunk.body)), "a mutated body gave other bits"
            result.decoded += 1
        assert replica.root == before
        result.slowest_s = max(result.slowest_s, time.thread_time() - start)
        result.cases += 1
        progress(case)
    assert result.slowest_s < _SLOWEST_S, f"a chunk took {result.slowest_s:.1f} s"
    return result


def fuzz_routes(n: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> FuzzResult:
    """Decode `n` mutated routes of experts. Raises `AssertionError` when a property is violated.

    Mutated bytes may be the code of other routes, but those are valid, and have no second code.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for experts, chosen, layers, tokens, skew in ((8, 2, 2, 20, 0.0), (128, 8, 3, 6, 2.0), (300, 4, 1, 9, 5.0)):
        keys = rng.gumbel(size=(tokens, layers, experts)) + skew * rng.standard_normal((layers, experts))
        ids = np.argsort(-keys, -1)[..., :chosen]
        samples.append((encode_routes(ids, experts), RouteShape(layers, chosen, experts), tokens))
    result = FuzzResult()
    for case in range(n):
        data, shape, tokens = samples[case % len(samples)]
        mutated = _mutated(data, samples[int(rng.integers(0, len(samples)))][0], rng)
        start = time.thread_time()
        try:
            ids = decode_routes(mutated, shape, tokens)
        except SwarmError:
            result.refused += 1
        else:
            result.decoded += 1
            assert ids.shape == (tokens, shape.layers, shape.chosen)
            assert ids.max() < shape.experts
            assert (ids[..., 1:] > ids[..., :-1]).all()
        if case >= len(samples):  # the first compile
            result.slowest_s = max(result.slowest_s, time.thread_time() - start)
        result.cases += 1
        progress(case)
    assert result.slowest_s < _SLOWEST_S, f"routes took {result.slowest_s:.1f} s"
    return result


def main() -> None:
    parser = json_parser(__doc__)
    parser.add_argument(
        "--n", type=int, default=10_000, help="mutations: 3/5 rice, 1/5 each pco, values, chunks; n of routes"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    results = {
        "rice": fuzz_payloads("rice", options.n * 3 // 5, options.seed),
        "pco": fuzz_payloads("pco", options.n // 5, options.seed),
        "values": fuzz_payloads("values", options.n // 5, options.seed),
        "chunks": fuzz_chunks(options.n // 5, options.seed),
        "routes": fuzz_routes(options.n, options.seed),
    }
    seconds = time.perf_counter() - start
    if options.json:
        print(json.dumps({name: asdict(result) for name, result in results.items()} | {"seconds": seconds}))
        return
    for name, result in results.items():
        print(
            f"{name:<7} {result.cases:>9,} cases: {result.refused:,} refused, {result.decoded:,} decoded in bounds; "
            f"slowest {1000 * result.slowest_s:.1f} ms"
        )
    print(f"no crash, no hang, nothing accepted; {seconds:.0f} s")


if __name__ == "__main__":
    main()
