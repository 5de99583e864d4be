"""Publishes a checkpoint folder as the next version, without building the model.

    swarm-node keygen; swarm-node seed --base BASE
    python examples/publish_checkpoint.py CHECKPOINT --step 500

CHECKPOINT holds safetensors files with the tensors of BASE. `swarm-node publish CHECKPOINT` does the same from a shell,
and `swarm-node seed --watch FOLDER` publishes every checkpoint that appears in a folder.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from node import Swarm


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every safetensors file in the folder, one tensor in memory at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                yield name, file.get_tensor(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--home", type=Path, help="SWARM_HOME of the seed (default: the variable)")
    parser.add_argument("--step", type=int, default=0, help="the trainer's own count, for people")
    parser.add_argument("--quorum", type=float, default=0.0, help="share of the live nodes to wait for, 0 to 1")
    args = parser.parse_args()

    with Swarm.attach(home=args.home) as swarm:
        pub = swarm.publish(tensors_of(args.checkpoint), step=args.step).wait(quorum=args.quorum)
        print(f"version {pub.epoch}.{pub.version} root {pub.root.hex()} delta {pub.bytes} bytes", flush=True)


if __name__ == "__main__":
    main()
