"""A trainer of one adapter, as a process of its own: `adapter_trainer.py HOME NAME BASE FIRST COUNT PAUSE_S`.

Publishes the steps FIRST to FIRST + COUNT - 1 and prints a JSON line for each once it is sealed. A step's weights
depend on its number and the adapter's name only.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from codec import Checkpoint
from codec.adapter import linear_layers
from node import Swarm

RANK = 64


def adapter(name: str, step: int, base: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """(peft config, tensors): a step changes 2 % of the elements of the step before."""
    tensors = {}
    for i, (module, (out, in_)) in enumerate(sorted(linear_layers(Checkpoint.open(base).layout).items())):
        for matrix, shape in (("A", (RANK, in_)), ("B", (out, RANK))):
            rng = np.random.default_rng([*name.encode(), i, ord(matrix)])
            values = (0.02 * rng.standard_normal(shape)).astype(np.float32)
            flat = values.reshape(-1).view(np.uint32)
            for s in range(1, step + 1):
                flat[s % 50 :: 50] += np.uint32(1 << 16)
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = values
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": "all-linear"}, tensors


def main() -> None:
    home, name, base, first, count, pause_s = sys.argv[1:]
    with Swarm.attach(home=home, start=False) as swarm:
        for step in range(int(first), int(first) + int(count)):
            publication = swarm.publish(adapter(name, step, Path(base)), step=step, adapter=name)
            publication.wait(timeout_s=120)
            row = {"step": step, "version": publication.version, "own": publication.adapter_version}
            print(json.dumps(row), flush=True)
            time.sleep(float(pause_s))


if __name__ == "__main__":
    main()
