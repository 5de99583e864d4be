"""`swarm-node delta --shapes NAME`: what a step of a model costs, from the shapes of its tensors alone.

Of each kind of tensor a few blocks of a made-up step are coded by the real coder. All blocks of the model then have the
payloads of these samples: they are packed by the real packer, some of the chunks are sealed to learn how long headers
are, and the manifest is sealed as well (`packed`). The rest is arithmetic, also that of what one rank of a divided
engine needs (`shards`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import reduce
from itertools import cycle
from operator import or_
from typing import Any, Final

import numpy as np

from codec.bits import DTYPES, Bits
from codec.chunk import CODER_RICE, BlockDelta
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS, Layout
from codec.rice import warm_up
from codec.shards import MAX_SHARDS, Parallel, block_ranks, exact_bytes, has_experts, per_rank
from codec.staging import encode
from node.settings import memory_plan
from node.tools.distribution import Dollars, EgressPrices, Seconds, dollars_of, seconds_of
from node.tools.made_up import amplitude_of, made_up_norm, made_up_step
from node.tools.packed import Packed, pack
from node.tools.shapes import Kind, Shapes
from node.tools.table import bytes_text, distribution_rows, table

__all__ = ["DENSITY", "Reckoned", "reckon", "render"]

DENSITY: Final = 0.01
"""Share of the elements that a step changes, unless the user names another: an RL step at a learning rate of 1e-6."""
_SAMPLE_BLOCKS: Final = 4
"""Whole blocks sampled of each kind of tensor: rows are of different size, and a block of wide rows has only a few."""
_TRAINER_COPIES: Final = 2
"""Copies of the weights in a trainer's shared memory: `publish` fills one while the other is encoded."""
_BF16: Final = DTYPES["BF16"]


@dataclass(frozen=True, slots=True)
class ShardShare:
    """What one rank of an engine takes of a model and of a step, in bytes; of all ranks the one with the largest
    `delta_bytes`.

    A rank takes whole chunks, and the headers of all others too, since these have the hashes of the blocks that it
    lacks: with them it computes the root of the version.
    """

    rank: int
    exact_bytes: int
    """The weights that it computes with."""
    replica_bytes: int
    """The blocks that have any of them."""
    delta_bytes: int
    """Of a version none of whose chunks has blocks for different ranks."""
    uncut_delta_bytes: int
    """Of a version whose chunks are cut in the model's order, as a seed does without `--shards`."""
    chunks: int
    """Chunks of a whole version that is cut for the ranks."""


@dataclass(frozen=True, slots=True)
class Reckoned:
    """What one step costs. Times: seconds; sizes: bytes. Where `DeltaReport` has a field of the same name, it means the
    same; nothing here was measured on a real step."""

    shapes: str
    tensors: int
    elements: int
    changed: int
    density: float
    bits_per_change: float
    delta_bytes: int
    full_bytes: int
    ratio: float
    chunks: int
    blocks: int
    up_mbit: float
    nodes: int
    seconds: Seconds
    memory: dict[str, int]
    """Bytes at the peak, by role, as `node.settings.memory_plan` reckons them."""
    dollars: Dollars | None
    shards: int | None = None
    shares: dict[Parallel, ShardShare] = field(default_factory=dict)
    """What the rank that takes most of a step takes, if the engine has `shards` ranks."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for `--json`, with the seconds under the names that `DeltaReport` has."""
        fields = asdict(self)
        fields |= {f"{way}_s": value for way, value in fields.pop("seconds").items()}
        fields["memory_bytes"] = fields.pop("memory")
        fields["usd"] = fields.pop("dollars")
        fields["shares"] = {kind.name.lower(): share for kind, share in fields["shares"].items()}
        return fields | {"reckoned": True}


@dataclass(slots=True)
class _Samples:
    """Coded blocks of one kind of tensor: some whole blocks, and the shorter last block of each tensor."""

    whole: list[BlockDelta | None]
    tail: BlockDelta | None
    changed: int
    """Elements of the samples that changed."""
    sampled: int

    def payload_bytes(self, kind: Kind) -> float:
        """Bytes of the payloads of all tensors of the kind."""
        sizes = [0 if coded is None else len(coded.payload) for coded in self.whole]
        whole = kind.elements // BLOCK_ELEMENTS * sum(sizes) / max(len(sizes), 1)
        return kind.count * (whole + (0 if self.tail is None else len(self.tail.payload)))


def _blocks(kind: Kind, amplitude: float, rng: np.random.Generator) -> Iterator[tuple[Bits, Bits]]:
    """Made-up blocks of a kind, before and after the step: whole ones, then the last of a tensor if it is shorter."""
    whole, tail = divmod(kind.elements, BLOCK_ELEMENTS)
    for elements in [BLOCK_ELEMENTS] * min(_SAMPLE_BLOCKS, whole * kind.count) + [tail] * (tail > 0):
        if len(kind.shape) == 1:
            norm = made_up_norm(elements)
            yield norm, norm
        else:
            columns = kind.shape[-1]
            old, new = made_up_step(-(-elements // columns), columns, amplitude, rng)
            yield old[:elements], new[:elements]


def _sample(kind: Kind, amplitude: float, rng: np.random.Generator, coder: int) -> _Samples:
    found = _Samples([], None, 0, 0)
    for old, new in _blocks(kind, amplitude, rng):
        coded = encode(0, old, new, _BF16, coder)
        found.changed += int(np.count_nonzero(old != new))
        found.sampled += old.size
        if old.size == BLOCK_ELEMENTS:
            found.whole.append(coded)
        else:
            found.tail = coded
    return found


def _payloads(layout: Layout, samples: dict[str, _Samples]) -> Iterator[BlockDelta]:
    """A coded block for every block of the model that changes, in the model's order. `samples`: by tensor name."""
    block = 0
    turns = {id(found): cycle(found.whole or [None]) for found in samples.values()}
    for tensor in layout.tensors:
        found = samples[tensor.name]
        for index in range(tensor.n_blocks):
            is_tail = tensor.elements - index * BLOCK_ELEMENTS < BLOCK_ELEMENTS
            coded = found.tail if is_tail else next(turns[id(found)])
            if coded is not None:
                yield BlockDelta(block, coded.coder, coded.new_hash, coded.payload)
            block += 1


def reckon(
    shapes: Shapes,
    *,
    density: float = DENSITY,
    up_mbit: float = 300,
    nodes: int = 16,
    prices: EgressPrices | None = None,
    shards: int | None = None,
    seed: int = 0,
    coder: int = CODER_RICE,
) -> Reckoned:
    """Reckon one step. `density`: share of the elements that it changes. `shards`: ranks of an engine, each of which
    is to take only what it needs. `seed`: of the made-up samples.

    Samples do not have exactly the density that was asked for (rows are of different size), so payloads are scaled to
    it. Raises `UsageError` for a density or a number of shards outside its limits.
    """
    if not 1e-4 <= density <= 0.5:
        raise UsageError("--density is the share of the elements that a step changes, from 0.0001 to 0.5.")
    if shards is not None and not 2 <= shards <= MAX_SHARDS:
        raise UsageError(f"--shards is the number of ranks that divide a model, from 2 to {MAX_SHARDS}.")
    warm_up(_BF16)
    layout = shapes.layout
    amplitude = amplitude_of(density)
    samples: dict[str, _Samples] = {}
    sampled_changes = sampled_bytes = 0.0
    for index, kind in enumerate(shapes.kinds):
        found = _sample(kind, amplitude, np.random.default_rng((seed, index)), coder)
        samples |= dict.fromkeys(kind.names(), found)
        sampled_changes += kind.count * kind.elements * found.changed / max(found.sampled, 1)
        sampled_bytes += found.payload_bytes(kind)
    changed = round(density * shapes.elements)
    expected = round(sampled_bytes * changed / max(sampled_changes, 1.0))

    packed = pack(_payloads(layout, samples), expected, changed)
    cost = packed.nbytes
    full = layout.full_bytes
    return Reckoned(
        shapes=shapes.title,
        tensors=len(layout.tensors),
        elements=shapes.elements,
        changed=changed,
        density=density,
        bits_per_change=8 * cost / max(changed, 1),
        delta_bytes=cost,
        full_bytes=full,
        ratio=full / cost,
        chunks=len(packed.chunks),
        blocks=layout.n_blocks,
        up_mbit=up_mbit,
        nodes=nodes,
        seconds=seconds_of(full, cost, nodes, up_mbit),
        memory=_memory(layout.nbytes),
        dollars=None if prices is None else dollars_of(full, cost, nodes, prices),
        shards=shards,
        shares={} if shards is None else _shares(layout, packed, expected, changed, shards),
    )


def _shares(layout: Layout, packed: Packed, body_bytes: int, changed: int, shards: int) -> dict[Parallel, ShardShare]:
    """By each way to divide the model that divides anything. `packed`: the version, cut in the model's order."""
    deltas = [delta for chunk in packed.chunks for delta in chunk]
    return {
        kind: _share(layout, packed, pack(deltas, body_bytes, changed, classes), classes, shards, kind)
        for kind in Parallel
        if kind is not Parallel.EXPERT or has_experts(layout)
        for classes in [block_ranks(layout, shards, kind)]
    }


def _share(layout: Layout, uncut: Packed, cut: Packed, classes: list[int], shards: int, kind: Parallel) -> ShardShare:
    blocks: Counter[int] = Counter()
    for block, ranks in enumerate(classes):
        blocks[ranks] += layout.block(block).nbytes
    taken, uncut_taken = (_taken(packed, classes, shards) for packed in (cut, uncut))
    rank = max(range(shards), key=taken.__getitem__)
    return ShardShare(
        rank=rank,
        exact_bytes=exact_bytes(layout, shards, kind)[rank],
        replica_bytes=per_rank(blocks, shards)[rank],
        delta_bytes=taken[rank],
        uncut_delta_bytes=uncut_taken[rank],
        chunks=len(cut.chunks),
    )


def _taken(packed: Packed, classes: list[int], shards: int) -> list[int]:
    """For each rank, the bytes on the wire of the chunks that have a block for it, and of everything else's headers."""
    bodies: Counter[int] = Counter()
    for chunk in packed.chunks:
        bodies[reduce(or_, (classes[delta.block] for delta in chunk))] += sum(len(delta.payload) for delta in chunk)
    headers = packed.header_bytes * len(packed.chunks)
    scale = (packed.payload_bytes - headers) / max(bodies.total(), 1)  # to the density that was asked for
    return [round(scale * body + headers) + packed.manifest_bytes for body in per_rank(bodies, shards)]


def _memory(model_bytes: int) -> dict[str, int]:
    """Host memory by role, without an engine: what the processes themselves reckon before they reserve it."""
    plans = {
        "trainer": memory_plan.publisher(model_bytes, _TRAINER_COPIES),
        "seed": memory_plan.seed(model_bytes),
        "node": memory_plan.node(model_bytes, on_disk=False),
        "node_on_disk": memory_plan.node(model_bytes, on_disk=True),
        "node_from_engine": memory_plan.node(model_bytes, on_disk=True, from_engine=True),
        "relay": memory_plan.relay(),
    }
    return {role: plan.nbytes for role, plan in plans.items()}


_ROLES: Final = {
    "trainer": "publishing process, beside its own parameters",
    "seed": "seed",
    "node": "node or joiner, replica in memory, without its engine",
    "node_on_disk": "the same, replica on disk",
    "node_from_engine": "the same, replica in its engine's memory",
    "relay": "relay",
}


def _share_rows(report: Reckoned) -> Iterator[tuple[str, str]]:
    if report.shards is None:
        return
    yield f"one of {report.shards} ranks", "the one that takes most, if it takes only chunks that it needs"
    for kind, share in report.shares.items():
        exact, replica = (
            f"{100 * part / report.full_bytes:.3g} %" for part in (share.exact_bytes, share.replica_bytes)
        )
        cut, uncut = (100 * part / report.delta_bytes for part in (share.delta_bytes, share.uncut_delta_bytes))
        yield f"  {kind.value}", f"computes with {exact} of the model; the blocks of that: {replica}"
        yield "", f"{bytes_text(share.delta_bytes)} of each delta, {cut:.3g} % ({uncut:.3g} % if chunks mix ranks)"
        yield "", f"a version has {share.chunks:,} such chunks"


def render(report: Reckoned) -> str:
    """The report as a table for people."""
    memory = ((f"  {bytes_text(report.memory[role])}", words) for role, words in _ROLES.items())
    rows = (
        ("reckoned", f"{report.shapes}: {report.tensors:,} tensors, no step was measured"),
        ("changed", f"{report.changed:,} of {report.elements:,} elements ({100 * report.density:.3g} %), as given"),
        (
            "delta",
            f"{bytes_text(report.delta_bytes)} in {report.chunks:,} chunks, {report.bits_per_change:.2f} bits a change",
        ),
        ("full copy", f"{bytes_text(report.full_bytes)}: {report.ratio:.0f} x the delta"),
        *distribution_rows(report.nodes, report.up_mbit, report.seconds, report.dollars),
        *_share_rows(report),
        ("host memory", "at the peak, while a version is on its way"),
        *memory,
    )
    return table(rows)
