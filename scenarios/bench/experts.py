"""Measures what a version costs of which only some experts of a mixture changed.

    python -m scenarios.bench.experts [--json] [--part bytes] [--experts 128] [--changed 8] [--density 0.02]
    python -m scenarios.bench.experts --part pause                (needs a vLLM: see `scenarios.engines.updates`)

`bytes`: a real seed and a real node. The model has two layers of experts, stored one by one. Versions in which
`--changed` experts of each layer changed are compared with versions in which all changed: by as many elements in all,
and by as many elements an expert. `one element`: a version in which a single weight of a norm changed.

`pause`: a vLLM for CPUs, which repacks experts. The pause of a version that is written in place, against that of
loading everything again.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from codec import FileSpec, Layout, TensorSpec, write_checkpoint
from codec.bits import Bits
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.swarm import Swarm, swarm_on

__all__ = ["Mixture", "main", "measure_bytes"]

LAYERS: Final = 2
SHAPE: Final = (128, 512)
"""Of each of an expert's three matrices."""
CONFIG: Final = b'{"model_type": "none"}'
PARTS: Final = ("bytes", "pause")
UPDATES: Final = 10
RELOADS: Final = 3


class Mixture:
    """A made-up mixture of experts. `words`: the bf16 bits (uint16) of each tensor in its newest version."""

    def __init__(self, experts: int, *, stacked: bool = False) -> None:
        """`stacked`: all experts of a layer are in one tensor."""
        self._experts = experts
        names = ("down_proj", "gate_proj", "up_proj")
        tensors = [TensorSpec("model.norm.weight", "BF16", (512,))]
        for layer in range(LAYERS):
            tensors.append(TensorSpec(f"model.layers.{layer}.self_attn.q_proj.weight", "BF16", (512, 512)))
            prefix = f"model.layers.{layer}.mlp.experts"
            if stacked:
                tensors += [TensorSpec(f"{prefix}.{name}", "BF16", (experts, *SHAPE)) for name in names]
            else:
                tensors += [
                    TensorSpec(f"{prefix}.{expert}.{name}.weight", "BF16", SHAPE)
                    for expert in range(experts)
                    for name in names
                ]
        files = (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),)
        self.layout = Layout(tuple(sorted(tensors, key=lambda tensor: tensor.name)), files)
        rng = np.random.default_rng(0)
        self.words: dict[str, Bits] = {tensor.name: _normal(rng, tensor.elements) for tensor in self.layout.tensors}

    def _of_expert(self, expert: int) -> Iterator[Bits]:
        unit = SHAPE[0] * SHAPE[1]
        for name, words in self.words.items():
            if f".experts.{expert}." in name:
                yield words
            elif ".experts." in name and len(words) > unit:
                yield words[expert * unit : (expert + 1) * unit]

    def step(self, experts: Sequence[int], density: float, seed: int) -> int:
        """Flip the lowest bit of a share of these experts' elements in every layer, and of one norm's element.

        Returns the number of changed elements.
        """
        rng = np.random.default_rng(seed)
        self.words["model.norm.weight"][seed % 512] ^= 1
        changed = 1
        for expert in experts:
            for words in self._of_expert(expert):
                places = rng.choice(len(words), max(1, round(density * len(words))), replace=False)
                words[places] ^= 1
                changed += len(places)
        return changed

    def write(self, folder: Path) -> Path:
        write_checkpoint(folder, self.layout, self.words.__getitem__, {"config.json": CONFIG})
        return folder


def _normal(rng: np.random.Generator, elements: int) -> Bits:
    values = (0.02 * rng.standard_normal(elements)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def measure_bytes(folder: Path, experts: int, few: int, density: float) -> list[dict[str, Any]]:
    """Publish the versions, and return a row for each. `few`: experts that change where not all do."""
    mixture = Mixture(experts)
    cases: list[tuple[str, Sequence[int], float]] = [
        ("one element", (), 0.0),
        (f"{few} of {experts} experts", range(0, experts, experts // few)[:few], density),
        ("all, as many elements in all", range(experts), density * few / experts),
        ("all, as many elements an expert", range(experts), density),
    ]
    rows = []
    folder.mkdir(parents=True, exist_ok=True)
    with swarm_on(folder, mixture.write(folder / "base"), nodes=1) as swarm:
        for number, (name, chosen, share) in enumerate(cases, 1):
            changed = mixture.step(chosen, share, number)
            published = _publish(swarm, mixture.write(folder / f"v{number}"), number)
            rows.append({"case": name, "changed": changed} | published)
    return rows


def _publish(swarm: Swarm, folder: Path, number: int) -> dict[str, Any]:
    before = swarm.own_status("node0").received_bytes
    swarm.publish(folder, "--wait")
    swarm.until_seed(f"the node holds version {number}", lambda seed: [n.held for n in seed.nodes] == [(0, number)])
    step = swarm.seed_status().steps[-1]
    return {
        "delta_bytes": step.delta_bytes,
        "received_bytes": swarm.own_status("node0").received_bytes - before,
        "bits_per_change": step.bits_per_change,
        "experts": step.experts,
        "experts_touched": step.experts_touched,
    }


def measure_pause(folder: Path, experts: int) -> dict[str, Any]:
    """Update a vLLM by 1 % of all elements a version, then load everything again. Seconds; medians."""
    from scenarios.engines.engine_bench import bench
    from scenarios.engines.engine_models import make_experts, step_of
    from scenarios.engines.vllm_environment import vllm_python

    model = make_experts(folder / "model", experts=experts)
    with bench(model, folder / "home", vllm_python(), threads=1) as live:
        pauses = [live.update(step_of(live.replica, number)) for number in range(1, UPDATES + 1)]
        reloads = []
        for _ in range(RELOADS):
            started = time.perf_counter()
            live.reload()
            reloads.append(time.perf_counter() - started)
        return {
            "parameters": sum(tensor.elements for tensor in live.replica.layout.tensors),
            "loaded_tensors": len(live.engine.classes.loaded),
            "pause_in_place_s": statistics.median(pauses),
            "reload_and_proof_s": statistics.median(reloads),
        }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'version':<34} {'changed':>9} {'delta':>10} {'received':>10} {'bits/change':>12} {'experts':>12}"]
    for row in rows:
        touched = f"{row['experts_touched']} of {row['experts']}"
        lines.append(
            f"{row['case']:<34} {row['changed']:>9,} {row['delta_bytes']:>10,} {row['received_bytes']:>10,} "
            f"{row['bits_per_change']:>12.2f} {touched:>12}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="measure only this; may be repeated")
    parser.add_argument("--experts", type=int, default=128, help="in each layer (default 128)")
    parser.add_argument("--changed", type=int, default=8, help="experts that change where not all do (default 8)")
    parser.add_argument("--density", type=float, default=0.02, help="of a changed expert (default 0.02)")
    given = parser.parse_args()
    if not 1 <= given.changed <= given.experts:
        parser.error("--changed: from 1 to --experts")
    return _report(given)


def _report(given: argparse.Namespace) -> int:
    parts, out = given.part or PARTS[:1], {}
    with tempfile.TemporaryDirectory(prefix="swarm-experts-") as top:
        if "bytes" in parts:
            out["bytes"] = measure_bytes(Path(top) / "swarm", given.experts, given.changed, given.density)
        if "pause" in parts:
            out["pause"] = measure_pause(Path(top) / "engine", given.experts)
    if given.json:
        print(json.dumps(out, indent=1))
        return 0
    if "bytes" in out:
        print(_table(out["bytes"]))
    for name, value in out.get("pause", {}).items():
        print(f"{name:<20} {value:.4g}" if isinstance(value, float) else f"{name:<20} {value:,}")
    return 0


if __name__ == "__main__":
    run_as_program(main)
