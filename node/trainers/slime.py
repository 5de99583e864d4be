"""slime and miles on the swarm, without a change to them: the hook that they call when they have written a version.

    --update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir DIR \\
    --custom-update-weight-post-write-path node.trainers.slime.publish

The seed is found by SWARM_HOME, on the host of rank 0, and serves the model of `--hf-checkpoint`. The engine that slime
asks for tokens is `python -m node.trainers.slime_engine`. Reads what slime writes at commit 624b824a and miles at
31f1ca96: folders with the deltas of the changed tensors, and whole checkpoints (slime's `--update-weight-mode full`).
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from node.trainers.api import Swarm
from node.trainers.delta_publisher import DeltaPublisher, TensorDelta

__all__ = ["publish", "publish_folder"]

_FOLDER: Final = re.compile(r"weight_v(\d{1,9})")


def publish(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """The hook. Every rank calls it; rank 0 publishes, and goes on when the version is sealed.

    Raises what `publish_folder` and `Swarm.attach` raise.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    number = _FOLDER.fullmatch(Path(version_dir).name)
    if number is None:  # called once for the folder of all versions, before the first
        _publisher().publish_checkpoint(Path(args.hf_checkpoint), 0)
    else:
        publish_folder(_publisher(), Path(version_dir), int(number[1]))


@cache
def _publisher() -> DeltaPublisher:
    """Of this process: slime gives a hook nothing to keep its state in."""
    return DeltaPublisher(Swarm.attach(start=False))


def publish_folder(publisher: DeltaPublisher, folder: Path, number: int) -> None:
    """Publish slime's version `number`, a folder of deltas or a whole checkpoint.

    Raises what the methods of `DeltaPublisher` raise.
    """
    file = folder / "model.safetensors.index.json"
    index = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
    how = index.get("metadata", {})
    if "delta_encoding" not in how:
        publisher.publish_checkpoint(folder, number)
        return
    deltas = _deltas(folder, index["weight_map"], how["checksum_format"])
    publisher.publish_deltas(number, int(how["base_version"]), deltas, how["delta_encoding"])


def _deltas(folder: Path, files: dict[str, str], algorithm: str) -> Iterator[TensorDelta]:
    from safetensors import safe_open  # a dependency of slime

    for file in sorted({Path(name).name for name in files.values()}):
        with safe_open(folder / file, "numpy") as stored:
            checksums = stored.metadata() or {}
            for name in list(stored.keys()):
                yield TensorDelta(name, stored.get_tensor(name), algorithm, checksums.get(name))
