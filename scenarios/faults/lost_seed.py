"""Loses the seed, its disk and a node, and measures how soon weights and saved state are back on a new machine.

A seed with a made-up model, nodes without engines, all on this machine. A state of random bytes is saved; then the seed
is killed and its home deleted, a node is killed, and `swarm-node rescue` fetches both with nothing but a copy of the
key and the addresses that `save-state` printed. Every byte is compared.

    python -m scenarios.faults.lost_seed                       # 100 M parameters in bf16, a state of 800 MB, 4 nodes
    python -m scenarios.faults.lost_seed --mb 80 --parameters 10_000_000 --nodes 6 --lose 3
"""

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from codec import Checkpoint, FileSpec, Layout, TensorSpec, write_checkpoint
from codec.errors import UsageError
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.swarm import State, swarm_on

__all__ = ["main", "measure"]

_TENSOR: Final = (4096, 1024)
_CONFIG: Final = b'{"model_type": "none"}'
_WITHIN_S: Final = 600.0
_PART_BYTES: Final = 1 << 24


def measure(folder: Path, parameters: int, state_bytes: int, nodes: int, lose: int) -> dict[str, Any]:
    """One run in the new folder `folder`. `lose`: how many nodes are killed with the seed. Sizes in bytes, times in
    seconds. Raises `ProcessFailed` when a command fails or something comes back with other bits."""
    base, state = folder / "base", folder / "state"
    layout = _model(base, parameters)
    digest = _random_file(state, state_bytes)
    with swarm_on(folder / "swarm", base, nodes=nodes) as swarm:
        for number in range(nodes):
            swarm.until(f"node{number}", _holds_the_model)
        saved = swarm.json("seed", "save-state", str(state), "--step", "1", within_s=_WITHIN_S)
        key = folder / "kept.key"
        shutil.copy(swarm.home("seed") / "authority.key", key)
        swarm.kill("seed")
        shutil.rmtree(swarm.home("seed"))
        for number in range(lose):
            swarm.kill(f"node{number}")
        began = time.monotonic()
        asked = [word for address in saved["nodes"] for word in ("--node", address)]
        back = swarm.json(
            "new", "rescue", str(folder / "rescued"), "--state", str(folder / "state.back"), "--key", str(key), *asked,
            within_s=_WITHIN_S,
        )  # fmt: skip
        rescued_s = time.monotonic() - began
    equal = _digest_of(folder / "state.back") == digest and _same_bits(base, folder / "rescued", layout)
    return {
        "scenario": "lost seed", "parameters": parameters, "weights_bytes": layout.nbytes, "state_bytes": state_bytes,
        "nodes": nodes, "lost": lose, "fragments": saved["fragments"], "needed": saved["needed"],
        "save_s": saved["seconds"], "rescue_s": rescued_s, "bit_equal": equal, "root": back["root"],
    }  # fmt: skip


def _holds_the_model(state: State) -> bool:
    """Whether a node has all of it: the seed counts it as a holder of the base before that."""
    return bool(state["nodes"][0]["root"]) and state["nodes"][0]["phase"] == "idle"


def _model(folder: Path, parameters: int) -> Layout:
    """A checkpoint of normal values with a deviation of 0.02; about so many parameters."""
    tensors = max(1, round(parameters / (_TENSOR[0] * _TENSOR[1])))
    specs = tuple(TensorSpec(f"layer.{number:04}.weight", "BF16", _TENSOR) for number in range(tensors))
    layout = Layout(specs, (FileSpec("config.json", len(_CONFIG), blake3(_CONFIG).digest()),))
    chance = np.random.default_rng(0)

    def bits(name: str) -> np.ndarray:
        values = (0.02 * chance.standard_normal(_TENSOR[0] * _TENSOR[1], np.float32)).view(np.uint32)
        return (values >> 16).astype(np.uint16)

    write_checkpoint(folder, layout, bits, {"config.json": _CONFIG})
    return layout


def _random_file(path: Path, size: int) -> bytes:
    """Its BLAKE3. As random mantissas are, it cannot be compressed."""
    chance, hasher = np.random.default_rng(1), blake3()
    with open(path, "wb") as out:
        for at in range(0, size, _PART_BYTES):
            part = chance.bytes(min(_PART_BYTES, size - at))
            hasher.update(part)
            out.write(part)
    return hasher.digest()


def _digest_of(path: Path) -> bytes:
    hasher = blake3()
    with open(path, "rb") as file:
        while part := file.read(_PART_BYTES):
            hasher.update(part)
    return hasher.digest()


def _same_bits(one: Path, other: Path, layout: Layout) -> bool:
    first, second = Checkpoint.open(one), Checkpoint.open(other)
    return all(bool((first.bits(spec.name) == second.bits(spec.name)).all()) for spec in layout.tensors)


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--mb", type=int, default=800, help="size of the state")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--lose", type=int, default=1, help="nodes that are killed with the seed, at most half")
    options = parser.parse_args()
    if not 0 <= options.lose <= options.nodes // 2:
        raise UsageError("--lose: at most half of --nodes")
    with tempfile.TemporaryDirectory(prefix="lost-seed-") as folder:
        found = measure(Path(folder), options.parameters, options.mb * 10**6, options.nodes, options.lose)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(
            f"{found['weights_bytes'] / 1e6:.0f} MB of weights and a state of {found['state_bytes'] / 1e6:.0f} MB in "
            f"{found['fragments']} fragments, {found['needed']} needed; the seed and {found['lost']} of "
            f"{found['nodes']} nodes lost.\nSaved in {found['save_s']:.1f} s, both back in {found['rescue_s']:.1f} s, "
            f"{'bit-equal' if found['bit_equal'] else 'WITH OTHER BITS'}."
        )
    return 0 if found["bit_equal"] else 1


if __name__ == "__main__":
    run_as_program(main)
