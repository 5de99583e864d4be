"""Measures adapters as versions of their own: 8 adapters over 4 nodes, by real processes on this machine.

    python -m scenarios.bench.adapter_versions                            8 adapters x 100 versions over 4 nodes
    python -m scenarios.bench.adapter_versions --versions 3 --json

A trainer publishes a version of each adapter in turn, each made up: `--share` of the adapter's elements move by one or
two steps of bfloat16, as an optimizer step with a small learning rate moves them. Of each version the table shows the
payload in bits per changed element, the copies of it that left the seed, and how long it took until every node held it.
A node holds a version when the root over all of its blocks is the one that the trainer signed off; the run fails when
one does not. For comparison, the same change is coded in a full model: blocks of a base of the same element type, with
the same share of changed elements.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec import Layout, TensorSpec, write_checkpoint
from codec.adapter import linear_layers
from codec.bits import DTYPES
from codec.chunk import CODER_RICE
from codec.layout import BLOCK_ELEMENTS
from codec.staging import encode_changes
from node import Swarm as Trainer
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.swarm import Swarm, swarm_on

__all__ = ["main", "measure"]

_ALPHA: Final = 32
_BLOCK_BYTES: Final = 32 + 6
"""What a full model's block costs beside its payload: its hash, and its number, coder and length in the header."""


class _Adapter:
    """A made-up adapter of every linear layer, in bfloat16."""

    def __init__(self, layout: Layout, rank: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.config = {"peft_type": "LORA", "r": rank, "lora_alpha": _ALPHA, "target_modules": "all-linear"}
        self.bits: dict[str, NDArray[np.uint16]] = {}
        for module, (out, in_) in linear_layers(layout).items():
            for matrix, shape in (("A", (rank, in_)), ("B", (out, rank))):
                self.bits[f"base_model.model.{module}.lora_{matrix}.weight"] = _values(self._rng, shape)

    @property
    def elements(self) -> int:
        return sum(bits.size for bits in self.bits.values())

    def step(self, share: float) -> None:
        """Move a share of the elements, as an optimizer step does."""
        for bits in self.bits.values():
            _move(self._rng, bits.reshape(-1), share)

    def source(self) -> Any:
        """For `Swarm.publish`."""
        return self.config, self.bits


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    return ((0.02 * rng.standard_normal(shape)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _move(rng: np.random.Generator, bits: NDArray[np.uint16], share: float) -> None:
    """Change `share` of the elements in place by one unit in the last place, a tenth of these by two, up or down."""
    chosen = rng.choice(bits.size, max(1, round(share * bits.size)), replace=False)
    size = np.where(rng.random(chosen.size) < 0.1, 2, 1)
    up = rng.random(chosen.size) < 0.5
    bits[chosen] += np.where(up, size, -size).astype(np.uint16)


def full_model_bits(share: float, blocks: int = 4) -> float:
    """Bits per changed element when the same share of a full model's blocks changes, hashes and headers included."""
    rng, bits, changed = np.random.default_rng(9), 0, 0
    for _ in range(blocks):
        old = _values(rng, (BLOCK_ELEMENTS,))
        new = old.copy()
        _move(rng, new, share)
        encoded = encode_changes(0, old, new, DTYPES["BF16"], CODER_RICE)
        assert encoded is not None
        bits += 8 * (len(encoded.delta.payload) + _BLOCK_BYTES)
        changed += encoded.changed
    return bits / changed


def measure(folder: Path, adapters: int, versions: int, nodes: int, rank: int, share: float) -> dict[str, Any]:
    """Publish `versions` versions of each of `adapters` adapters over `nodes` nodes. Raises when a node does not hold
    one."""
    width, layers = 1024, 8
    layout = Layout(tuple(TensorSpec(f"layers.{i}.up.weight", "BF16", (width, width)) for i in range(layers)))
    rng = np.random.default_rng(0)
    base = folder / "base"
    write_checkpoint(base, layout, lambda name: _values(rng, (width * width,)), {"config.json": b"{}"})
    words = ("--adapters", str(adapters), "--adapter-rank", str(rank))
    rows: list[dict[str, Any]] = []
    with swarm_on(folder, base, nodes, words) as swarm, Trainer.attach(home=swarm.home("seed"), start=False) as trainer:
        made = [_Adapter(layout, rank, seed) for seed in range(adapters)]
        for number in range(1, versions + 1):
            for slot, adapter in enumerate(made):
                if number > 1:
                    adapter.step(share)
                rows.append(_version(swarm, trainer, f"adapter-{slot}", number, adapter, nodes))
    steps = [row for row in rows if row["own_version"] > 1] or rows
    return {
        "adapters": adapters,
        "versions": versions,
        "nodes": nodes,
        "rank": rank,
        "elements": made[0].elements,
        "share": share,
        "bits_per_change": statistics.median(row["bits_per_change"] for row in steps),
        "full_model_bits_per_change": full_model_bits(share),
        "copies": statistics.median(row["copies"] for row in steps),
        "seconds": statistics.median(row["seconds"] for row in steps),
        "slowest_s": max(row["seconds"] for row in steps),
        "first_bytes": rows[0]["bytes"],
        "rows": rows,
    }


def _version(swarm: Swarm, trainer: Trainer, name: str, number: int, adapter: _Adapter, nodes: int) -> dict[str, Any]:
    began = time.monotonic()
    publication = trainer.publish(adapter.source(), step=number, adapter=name).wait(1.0, 120.0)
    seconds = time.monotonic() - began
    assert publication.root is not None
    assert publication.version is not None
    assert publication.adapter_version == number
    root = publication.root.hex()
    for index in range(nodes):  # the root over the bits that the node itself has hashed
        swarm.until(f"node{index}", lambda state: state["nodes"][0]["root"] == root)
    status = swarm.seed_status()
    step = next(step for step in status.steps if step.version == (publication.epoch, publication.version))
    changed = publication.changed or 1
    return {
        "adapter": name,
        "own_version": number,
        "version": publication.version,
        "changed": publication.changed,
        "bytes": publication.bytes,
        "bits_per_change": 8 * (publication.bytes or 0) / changed,
        "copies": step.trainer_copies or 0.0,
        "sent_bytes": step.trainer_sent_bytes,
        "seconds": seconds,
        "nodes_with_its_root": nodes,
    }


def _table(found: dict[str, Any]) -> str:
    ratio = found["bits_per_change"] / found["full_model_bits_per_change"]
    return "\n".join(
        (
            f"{found['adapters']} adapters of rank {found['rank']} ({found['elements']:,} elements each), "
            f"{found['versions']} versions of each, {found['nodes']} nodes",
            f"  bits per change          {found['bits_per_change']:8.2f}   {ratio:.3f} x a full model's "
            f"{found['full_model_bits_per_change']:.2f} at {100 * found['share']:g} %",
            f"  copies from the seed     {found['copies']:8.3f}",
            f"  until every node has it  {found['seconds']:8.3f} s (median), {found['slowest_s']:.3f} s (longest)",
            f"  first version            {found['first_bytes']:8,} bytes for {2 * found['elements']:,}",
            f"  roots                    {len(found['rows'])} versions x {found['nodes']} nodes: all equal",
        )
    )


def main(words: list[str] | None = None) -> int:
    """Run the benchmark; `words`: the command line."""
    import json

    parser: argparse.ArgumentParser = json_parser(__doc__)
    parser.add_argument("--adapters", type=int, default=8, help="adapters (default: 8; at most 64)")
    parser.add_argument("--versions", type=int, default=100, help="versions of each adapter (default: 100)")
    parser.add_argument("--nodes", type=int, default=4, help="nodes (default: 4)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
    parser.add_argument("--share", type=float, default=0.05, help="share of elements that a step changes")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.adapters, options.versions, options.nodes, options.rank, options.share)
    print(json.dumps(found, indent=1) if options.json else _table(found))
    return 0


if __name__ == "__main__":
    run_as_program(main)
