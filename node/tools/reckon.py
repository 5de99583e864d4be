"""`swarm-node delta --shapes NAME`: what a step of a model costs, from the shapes of its tensors alone.

Of each kind of tensor a few blocks of a made-up step are coded by the real coder. All blocks of the model then have the
payloads of these samples: they are packed by the real packer, some of the chunks are sealed to learn how long headers
are, and the manifest is sealed as well. The rest is arithmetic.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, Final

import numpy as np

from codec.bits import DTYPES, Bits
from codec.chunk import CODER_RICE, BlockDelta, ChunkKey, seal_chunk
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS, Layout
from codec.manifest import Manifest
from codec.pack import Packer, chunk_target, piece_target
from codec.rice import warm_up
from codec.sign import Key
from codec.staging import encode
from node.settings import memory_plan
from node.tools.distribution import Dollars, EgressPrices, Seconds, dollars_of, seconds_of
from node.tools.made_up import amplitude_of, made_up_norm, made_up_step
from node.tools.shapes import Kind, Shapes
from node.tools.table import bytes_text, distribution_rows, table

__all__ = ["DENSITY", "Reckoned", "reckon", "render"]

DENSITY: Final = 0.01
"""Share of the elements that a step changes, unless the user names another: an RL step at a learning rate of 1e-6."""
_SAMPLE_BLOCKS: Final = 4
"""Whole blocks sampled of each kind of tensor: rows are of different size, and a block of wide rows has only a few."""
_SEALED: Final = 64
"""Chunks that are sealed to learn the mean length of a header."""
_TRAINER_COPIES: Final = 2
"""Copies of the weights in a trainer's shared memory: `publish` fills one while the other is encoded."""
_KEY: Final = Key(bytes(32))
_NO_HASH: Final = bytes(32)
_BF16: Final = DTYPES["BF16"]


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

    def to_dict(self) -> dict[str, Any]:
        """The fields, for `--json`, with the seconds under the names that `DeltaReport` has."""
        fields = asdict(self)
        fields |= {f"{way}_s": value for way, value in fields.pop("seconds").items()}
        fields["memory_bytes"] = fields.pop("memory")
        fields["usd"] = fields.pop("dollars")
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


def _header_bytes(chunks: list[list[BlockDelta]], piece_bytes: int) -> float:
    """Mean bytes of a sealed header."""
    some = chunks[:: max(1, len(chunks) // _SEALED)]
    sealed = [
        len(seal_chunk(ChunkKey(0, 1, 0, seq), _NO_HASH, _NO_HASH, deltas, _KEY, piece_bytes).header)
        for seq, deltas in enumerate(some)
    ]
    return sum(sealed) / max(len(sealed), 1)


def _manifest_bytes(chunks: int, payload_bytes: int, changed: int) -> int:
    ids = tuple(seq.to_bytes(32, "big") for seq in range(chunks))
    roots = (_NO_HASH, _NO_HASH, _NO_HASH)
    return len(Manifest(_KEY.public, 0, 1, 0, *roots, ids, payload_bytes, changed).seal(_KEY))


def reckon(
    shapes: Shapes,
    *,
    density: float = DENSITY,
    up_mbit: float = 300,
    nodes: int = 16,
    prices: EgressPrices | None = None,
    seed: int = 0,
    coder: int = CODER_RICE,
) -> Reckoned:
    """Reckon one step. `density`: share of the elements that it changes. `seed`: of the made-up samples.

    Samples do not have exactly the density that was asked for (rows are of different size), so payloads are scaled to
    it. Raises `UsageError` for a density outside (0, 1].
    """
    if not 1e-4 <= density <= 0.5:
        raise UsageError("--density is the share of the elements that a step changes, from 0.0001 to 0.5.")
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

    packer = Packer(chunk_target(expected))
    chunks = [full for delta in _payloads(layout, samples) for full in packer.add(delta)] + packer.flush()
    headers = _header_bytes(chunks, piece_target(expected)) * len(chunks)
    payload = round(expected + headers)
    cost = payload + _manifest_bytes(len(chunks), payload, changed)
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
        chunks=len(chunks),
        blocks=layout.n_blocks,
        up_mbit=up_mbit,
        nodes=nodes,
        seconds=seconds_of(full, cost, nodes, up_mbit),
        memory=_memory(layout.nbytes),
        dollars=None if prices is None else dollars_of(full, cost, nodes, prices),
    )


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
        ("host memory", "at the peak, while a version is on its way"),
        *memory,
    )
    return table(rows)
