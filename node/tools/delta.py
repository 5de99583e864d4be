"""`swarm-node delta OLD NEW` and `swarm-node apply BASE DELTA OUT`: the size of a training step, without any swarm.

Both read mapped checkpoints block by block, so a model may be larger than the memory.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.bits import DTYPES, Bits
from codec.checkpoint import Checkpoint, write_checkpoint
from codec.chunk import CODER_RICE, Chunk, ChunkKey, open_header, seal_chunk, verify_piece
from codec.errors import PeerError, UsageError
from codec.experts import ExpertChanges, Experts
from codec.kernels.scan import scatter
from codec.layout import Layout
from codec.manifest import Manifest, state_root
from codec.pack import Packer, chunk_target, piece_target
from codec.rice import warm_up
from codec.sign import Key
from codec.staging import Torn, block_hash, encode, stage_chunk
from node.tools.delta_baselines import BASELINES, Timed, measure
from node.tools.delta_file import DeltaFile, DeltaWriter
from node.tools.distribution import Dollars, EgressPrices, Seconds, dollars_of, seconds_of
from node.tools.table import bytes_text, distribution_rows, table

__all__ = ["DeltaReport", "ExpertsReport", "Progress", "apply", "delta", "render"]

Progress = Callable[[float, float], None]
"""Called with the number of block visits done, and with the number in all; a block is visited more than once."""

_ROUNDS: Final = 4
"""Visits of every block: hashed in OLD, hashed in NEW, encoded and decoded, and encoded in the other formats."""
_FORMATS: Final = {"leb128": "in LEB128", "gaps16_zstd": "in u16 and zstd"}
"""Labels of the published formats in the table."""
_SAMPLES: Final = 16
"""Blocks that are encoded first, to estimate the payload, from which the chunk size follows."""


@dataclass(frozen=True, slots=True)
class BaselineReport:
    """The same step in another format, without hashes and signatures. Speeds: GB of weights a second, on one core."""

    bits_per_change: float
    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    exact: bool


@dataclass(frozen=True, slots=True)
class ExpertsReport:
    """What changed of each expert of a mixture. `count`: experts of all layers. `touched`: those of which anything
    changed. `min`, `median`, `max`: of the shares of an expert's elements that changed."""

    count: int
    touched: int
    untouched: int
    min: float
    median: float
    max: float
    layers: dict[str, dict[str, list[int]]]
    """By layer: `elements` and `changed` of each expert, by its number."""

    @classmethod
    def of(cls, experts: Experts, changes: ExpertChanges) -> "ExpertsReport":
        found = changes.spread()
        layers = {
            layer: {"elements": elements.tolist(), "changed": changes.changed[layer].tolist()}
            for layer, elements in experts.elements.items()
        }
        return cls(found.count, found.touched, found.untouched, found.min, found.median, found.max, layers)


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """What one step costs. Speeds: GB of weights a second, on one core, block hashes included. Times: seconds.

    `delta_bytes`: everything on the wire (chunks with headers, and the manifest). `bits_per_change`: bits of
    `delta_bytes` for each changed element. `exact`: every chunk was decoded, and the result has the root of NEW.
    """

    elements: int
    changed: int
    density: float
    bits_per_change: float
    delta_bytes: int
    full_bytes: int
    ratio: float
    chunks: int
    blocks: int
    encode_gb_s: float
    decode_gb_s: float
    exact: bool
    baselines: dict[str, BaselineReport]
    """Published formats on the same bits: LEB128 gaps and raw values; u16 gaps, raw values and zstd (if the package
    zstandard is installed)."""
    up_mbit: float
    nodes: int
    star_full_s: float
    star_delta_s: float
    swarm_s: float
    usd: Dollars | None = None
    """What the traffic of the step costs, if prices were given."""
    experts: ExpertsReport | None = None
    """What changed of each expert; None: the model has none."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for `--json`, where the baselines have been called "anchors" since the first release."""
        fields = asdict(self)
        fields["anchors"] = fields.pop("baselines")
        return fields


def _quiet(done: float, total: float) -> None:
    """Show no progress."""


class _Mapped:
    """A checkpoint as a source of the blocks of `layout` (`codec.staging.BlockSource`); the constructor hashes them
    all.

    `done`, `total`: block visits before this, and in the whole command, for `progress`.
    """

    def __init__(self, checkpoint: Checkpoint, layout: Layout, progress: Progress, done: int, total: int) -> None:
        self.layout = layout
        self._checkpoint = checkpoint
        self._current = ""
        self._bits: Bits = np.empty(0, np.uint8)
        self.hashes: NDArray[np.uint8] = np.empty((layout.n_blocks, 32), np.uint8)
        for block in range(layout.n_blocks):
            self.hashes[block] = np.frombuffer(block_hash(self.block(block)), np.uint8)
            progress(done + block + 1, total)

    @property
    def root(self) -> bytes:
        return state_root(self.layout.hash, self.hashes)

    def block(self, block: int) -> Bits:
        spec = self.layout.block(block)
        if spec.name != self._current:
            self._current, self._bits = spec.name, self._checkpoint.bits(spec.name)
        return self._bits[spec.start : spec.start + spec.count]


def _same_model(old: Checkpoint, new: Checkpoint) -> None:
    """Raises `UsageError` unless both have the same tensors."""
    if old.layout.same_tensors(new.layout):
        return
    ours = {tensor.name: (tensor.dtype, tensor.shape) for tensor in old.layout.tensors}
    theirs = {tensor.name: (tensor.dtype, tensor.shape) for tensor in new.layout.tensors}
    name = min(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    raise UsageError(
        f"{old.path} and {new.path} are not two versions of one model: {name!r} is {ours.get(name, 'missing')} in one "
        f"and {theirs.get(name, 'missing')} in the other."
    )


def delta(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    up_mbit: float = 300,
    nodes: int = 16,
    prices: EgressPrices | None = None,
    coder: int = CODER_RICE,
    progress: Progress = _quiet,
) -> DeltaReport:
    """Encode the step from `old` to `new`, decode it again, compare, and report. `out`: also write it to this file.

    `up_mbit`: each node's uplink. `prices`: of traffic, for the dollars of the step. Raises `UsageError` when the two
    are not versions of one model, one cannot be read, or `out` exists.
    """
    before, after = Checkpoint.open(old), Checkpoint.open(new)
    _same_model(before, after)
    layout = after.layout
    for dtype in {tensor.dtype for tensor in layout.tensors}:
        warm_up(DTYPES[dtype])
    source = _Mapped(before, layout, progress, 0, _ROUNDS * layout.n_blocks)
    target = _Mapped(after, layout, progress, layout.n_blocks, _ROUNDS * layout.n_blocks)
    key = Key.generate()
    writer = None
    if out is not None:
        have = before.files
        writer = DeltaWriter(out, key.public, layout, {n: d for n, d in after.files.items() if have.get(n) != d})
    try:
        return _code(source, target, key, writer, coder, up_mbit, nodes, prices, progress)
    finally:
        if writer is not None:
            writer.abandon()  # does nothing to a finished file


class _Tally:
    """Sums over the chunks of one delta, with the CPU seconds of encoding and decoding."""

    def __init__(self, source: _Mapped) -> None:
        self.source = source
        self.hashes = source.hashes.copy()
        self.ids: list[bytes] = []
        self.payload_bytes = self.changed = 0
        self.encode_s = self.decode_s = 0.0
        self.torn = False
        self.experts = Experts(source.layout)
        self.of_experts = ExpertChanges(self.experts)

    def check(self, chunk: Chunk, public: bytes) -> None:
        """Do what a node does with a chunk: verify, decode, predict hashes, write (here into a copy of each block)."""
        start = time.thread_time()
        header = open_header(chunk.header, public)
        for piece in range(header.n_pieces):
            span = header.piece_range(piece)
            verify_piece(header, piece, memoryview(chunk.body)[span.start : span.stop])
        try:
            staged = stage_chunk(self.source, header, chunk.body)
        except Torn:
            self.torn = True
            return
        self.decode_s += time.thread_time() - start
        for block in staged:
            words = self.source.block(block.block).copy()
            start = time.thread_time()
            scatter(words, block.positions, block.bits)
            self.decode_s += time.thread_time() - start
            self.hashes[block.block] = np.frombuffer(block_hash(words), np.uint8)
            self.of_experts.add(block.block, block.positions)
        self.ids.append(chunk.id)
        self.payload_bytes += chunk.nbytes
        self.changed += staged.changed


def _estimate_payload(source: _Mapped, target: _Mapped) -> int:
    """Payload bytes of the version, estimated from a few blocks across the model."""
    layout = source.layout
    sampled = total = 0
    for block in range(0, layout.n_blocks, max(1, layout.n_blocks // _SAMPLES)):
        spec = layout.block(block)
        coded = encode(block, source.block(block), target.block(block), spec.dtype)
        sampled += len(coded.payload) if coded else 0
        total += spec.nbytes
    return round(sampled * layout.full_bytes / max(total, 1))


def _chunks(
    source: _Mapped, target: _Mapped, key: Key, coder: int, tally: _Tally, progress: Progress
) -> Iterator[Chunk]:
    """Encode block by block, and yield each chunk as soon as it is full."""
    layout = source.layout
    expected = _estimate_payload(source, target)
    packer = Packer(chunk_target(expected))
    root = source.root
    for block in range(layout.n_blocks + 1):
        start = time.thread_time()
        if block < layout.n_blocks:
            coded = encode(block, source.block(block), target.block(block), layout.block(block).dtype, coder)
            full = packer.add(coded) if coded else []
        else:
            full = packer.flush()
        for deltas in full:
            name = ChunkKey(0, 1, 0, len(tally.ids))
            chunk = seal_chunk(name, root, layout.hash, deltas, key, piece_target(expected))
            tally.encode_s += time.thread_time() - start
            yield chunk
            start = time.thread_time()
        tally.encode_s += time.thread_time() - start
        progress(2 * layout.n_blocks + block, _ROUNDS * layout.n_blocks)


def _code(
    source: _Mapped,
    target: _Mapped,
    key: Key,
    writer: DeltaWriter | None,
    coder: int,
    up_mbit: float,
    nodes: int,
    prices: EgressPrices | None,
    progress: Progress,
) -> DeltaReport:
    tally = _Tally(source)
    for chunk in _chunks(source, target, key, coder, tally, progress):
        tally.check(chunk, key.public)
        if writer is not None:
            writer.add_chunk(chunk)
    layout, payload = source.layout, tally.payload_bytes
    root = state_root(layout.hash, tally.hashes)
    manifest = Manifest(
        key.public, 0, 1, 0, source.root, root, layout.hash, tuple(tally.ids), payload, tally.changed
    ).seal(key)  # fmt: skip
    exact = not tally.torn and root == target.root
    if writer is not None:
        if not exact:
            raise RuntimeError("what was decoded is not NEW; nothing was written")
        writer.finish(manifest)
    baselines = _baselines(source, target, tally.changed, progress)
    elements = sum(tensor.elements for tensor in layout.tensors)
    cost, full = payload + len(manifest), layout.full_bytes
    seconds = seconds_of(full, cost, nodes, up_mbit)
    return DeltaReport(
        elements=elements,
        changed=tally.changed,
        density=tally.changed / max(elements, 1),
        bits_per_change=8 * cost / max(tally.changed, 1),
        delta_bytes=cost,
        full_bytes=full,
        ratio=full / cost,
        chunks=len(tally.ids),
        blocks=layout.n_blocks,
        encode_gb_s=full / 1e9 / max(tally.encode_s, 1e-9),
        decode_gb_s=full / 1e9 / max(tally.decode_s, 1e-9),
        exact=exact,
        baselines=baselines,
        up_mbit=up_mbit,
        nodes=nodes,
        star_full_s=seconds.star_full,
        star_delta_s=seconds.star_delta,
        swarm_s=seconds.swarm,
        usd=None if prices is None else dollars_of(full, cost, nodes, prices),
        experts=ExpertsReport.of(tally.experts, tally.of_experts) if tally.experts else None,
    )


def _baselines(source: _Mapped, target: _Mapped, changed: int, progress: Progress) -> dict[str, BaselineReport]:
    """Measure the published formats, block by block."""
    layout, full = source.layout, source.layout.full_bytes
    timed = {name: Timed() for name in BASELINES}
    for block in range(layout.n_blocks):
        for name, sums in timed.items():
            old, new, dtype = source.block(block), target.block(block), layout.block(block).dtype
            if block == 0:
                measure(name, old[:64], new[:64], dtype, Timed())  # compiles the kernels
            measure(name, old, new, dtype, sums)
        progress((_ROUNDS - 1) * layout.n_blocks + block + 1, _ROUNDS * layout.n_blocks)
    return {
        name: BaselineReport(
            8 * sums.payload_bytes / max(changed, 1),
            full / max(sums.payload_bytes, 1),
            full / 1e9 / max(sums.encode_s, 1e-9),
            full / 1e9 / max(sums.decode_s, 1e-9),
            sums.exact,
        )
        for name, sums in timed.items()
    }


def apply(
    base: str | os.PathLike[str],
    delta: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Progress = _quiet,
) -> bytes:
    """Apply the file `delta` to the checkpoint `base`, and write the result to the folder `out`, every hash checked.

    Returns its state root (32 bytes). Raises `UsageError` when `delta` was made from another base or is damaged, or
    `out` exists; nothing is left behind then.
    """
    file = DeltaFile(delta)
    checkpoint = Checkpoint.open(base)
    layout, manifest = file.layout, file.manifest
    if not checkpoint.layout.same_tensors(layout):
        raise UsageError(f"{delta} was made for another model than {base}. Give the checkpoint that it was made from.")
    source = _Mapped(checkpoint, layout, progress, 0, 2 * layout.n_blocks)
    if source.root != manifest.parent_root:
        raise UsageError(
            f"{delta} was made from another version than {base}. Give the checkpoint that it was made from."
        )
    chunks_of: dict[str, list[int]] = defaultdict(list)
    hashes = source.hashes.copy()
    for index, header in enumerate(file.headers):
        for entry in header.blocks:
            if entry.block >= layout.n_blocks:
                raise UsageError(f"{delta} is damaged: chunk.block: {entry.block} of {layout.n_blocks}.")
            hashes[entry.block] = np.frombuffer(entry.new_hash, np.uint8)
        for name in {layout.block(entry.block).name for entry in header.blocks}:
            chunks_of[name].append(index)
    if state_root(layout.hash, hashes) != manifest.root:
        raise UsageError(f"{delta} is damaged: its chunks do not lead to its root. Make or fetch it again.")
    headers = list(file.headers)

    def patched(name: str) -> Bits:
        """The tensor's new bits. Every changed block is checked against its signed hash."""
        progress(layout.n_blocks + layout.blocks_of(name).start, 2 * layout.n_blocks)
        bits = checkpoint.bits(name).copy()
        first = layout.blocks_of(name)
        for index in chunks_of[name]:
            for block in stage_chunk(source, headers[index], file.body(index)):
                if block.block in first:
                    start = layout.block(block.block).start
                    scatter(bits[start : start + layout.block(block.block).count], block.positions, block.bits)
        return bits

    files = checkpoint.files | file.files
    try:
        write_checkpoint(out, layout, patched, {spec.name: files[spec.name] for spec in layout.files})
    except (PeerError, Torn, KeyError) as error:
        raise UsageError(f"{delta} is damaged: {error}. Make or fetch it again.") from error
    return manifest.root


def render(report: DeltaReport) -> str:
    """The report as a table for people."""
    if not report.changed:  # figures for each changed element would mean nothing
        return table(
            [
                ("changed", f"0 of {report.elements:,} elements: both are the same, bit for bit"),
                ("full copy", bytes_text(report.full_bytes)),
                ("exact", "yes: every block hash is NEW's" if report.exact else "NO: this is a bug, please report it"),
            ]
        )
    rows = (
        ("changed", f"{report.changed:,} of {report.elements:,} elements ({100 * report.density:.3g} %)"),
        (
            "delta",
            f"{bytes_text(report.delta_bytes)} in {report.chunks} chunks, {report.bits_per_change:.2f} bits a change",
        ),
        ("full copy", f"{bytes_text(report.full_bytes)}: {report.ratio:.0f} x the delta"),
        ("encode", f"{report.encode_gb_s:.2f} GB of weights/s a core, hashes included"),
        ("decode + apply", f"{report.decode_gb_s:.2f} GB of weights/s a core, hashes included"),
        (
            "exact",
            "yes: decoded, and every block hash is NEW's" if report.exact else "NO: this is a bug, please report it",
        ),
        *(
            (f"  {_FORMATS[name]}", f"{found.bits_per_change:.2f} bits a change, full copy {found.ratio:.0f} x")
            for name, found in report.baselines.items()
        ),
        *_expert_rows(report.experts),
        *distribution_rows(
            report.nodes,
            report.up_mbit,
            Seconds(report.star_full_s, report.star_delta_s, report.swarm_s),
            report.usd,
        ),
    )
    return table(rows)


def _expert_rows(found: ExpertsReport | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    shares = f"{100 * found.min:.3g}, {100 * found.median:.3g} and {100 * found.max:.3g} %"
    return [
        ("experts", f"{found.touched:,} of {found.count:,} changed, in {len(found.layers)} layers"),
        ("  of an expert's elements", f"{shares} changed (least, median, most)"),
    ]
