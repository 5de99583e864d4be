"""slime and miles on the swarm, without a change to them: the hook that they call when they have written a version.

    --update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir DIR \\
    --custom-update-weight-post-write-path node.trainers.slime.publish

The seed is found by SWARM_HOME, on the host of rank 0, and serves the model of `--hf-checkpoint`. The engine that slime
asks for tokens is `python -m node.trainers.slime_engine`. Reads what slime writes at commit 624b824a and miles at
31f1ca96: folders with the deltas of the changed tensors (`disk_delta`), and whole checkpoints (slime's
`--update-weight-mode full`).
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from codec.bits import Bits
from codec.errors import UsageError
from node.trainers.api import Swarm
from node.trainers.disk_delta import applied, checksum
from node.trainers.publish_here import folder_tensors

__all__ = ["Publisher", "publish"]

_FOLDER: Final = re.compile(r"weight_v(\d{1,9})")


def publish(args: Any, version_dir: str, rollout_engines: Any) -> None:
    """The hook. Every rank calls it; rank 0 publishes, and goes on when the version is sealed.

    Raises what `Publisher` and `Swarm.attach` raise.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    number = _FOLDER.fullmatch(Path(version_dir).name)
    if number is None:  # called once for the folder of all versions, before the first
        _publisher().publish_base(Path(args.hf_checkpoint))
    else:
        _publisher().publish_folder(Path(version_dir), int(number[1]))


@cache
def _publisher() -> "Publisher":
    """Of this process: slime gives a hook nothing to keep its state in."""
    return Publisher(Swarm.attach(start=False))


class Publisher:
    """Publishes the folders of one run, in their order."""

    def __init__(self, swarm: Swarm, timeout_s: float = 600.0) -> None:
        """`timeout_s`: for each wait until a version is sealed."""
        self._swarm, self._timeout_s = swarm, timeout_s
        self._published: int | None = None
        """slime's number of the swarm's newest version; None: not known."""

    def publish_base(self, checkpoint: Path) -> None:
        """Publish the checkpoint that the deltas start from, which costs nothing if the swarm has it already."""
        self._publish(0, folder_tensors(checkpoint, self._swarm.layout))

    def publish_folder(self, folder: Path, number: int) -> None:
        """Publish version `number`, a delta or a whole checkpoint, and wait until it is sealed.

        Raises `UsageError` for a delta of another version than the one published before it, or whose tensors do not get
        the checksums that go with it; and what `Swarm.publish` and `Publication.wait` raise.
        """
        file = folder / "model.safetensors.index.json"
        index = msgspec.json.decode(file.read_bytes()) if file.is_file() else {}
        how = index.get("metadata", {})
        if "delta_encoding" not in how:
            self._publish(number, folder_tensors(folder, self._swarm.layout))
        elif int(how["base_version"]) == self._published:
            self._publish(number, self._changed(folder, how, index["weight_map"]))
        else:
            raise UsageError(
                f"{folder.name} changes slime's version {int(how['base_version'])}, and the swarm's newest is "
                f"{self._published}: start slime again, so that it begins with its --hf-checkpoint."
            )

    def _publish(self, number: int, tensors: Iterator[tuple[str, Bits]]) -> None:
        self._published = None
        self._swarm.publish(tensors, step=number, timeout_s=self._timeout_s).wait(timeout_s=self._timeout_s)
        self._published = number

    def _changed(self, folder: Path, how: dict[str, str], files: dict[str, str]) -> Iterator[tuple[str, Bits]]:
        """(name, bits) of every tensor: of the folder's deltas applied, and of the swarm's own for the others."""
        from safetensors import safe_open  # a dependency of slime

        specs = {name: spec for spec in self._swarm.layout.tensors for name in (spec.name, *spec.aliases)}
        changed: set[str] = set()
        for file in sorted({Path(name).name for name in files.values()}):
            with safe_open(folder / file, "numpy") as stored:
                checksums = stored.metadata() or {}
                for name in list(stored.keys()):
                    if name not in specs or specs[name].name in changed:
                        raise UsageError(f"{folder.name} has {name}, which the base lacks, or has it twice.")
                    spec = specs[name]
                    old = self._swarm.bits(spec.name).reshape(-1).view(np.uint8)
                    new = applied(stored.get_tensor(name), old, how["delta_encoding"])
                    if checksum(how["checksum_format"], new) != checksums.get(name):
                        raise UsageError(f"{folder.name}: {name} does not get slime's checksum: start slime again.")
                    changed.add(spec.name)
                    yield name, new.view(spec.type.bits).reshape(spec.shape)
        for spec in self._swarm.layout.tensors:
            if spec.name not in changed:
                yield spec.name, self._swarm.bits(spec.name).reshape(spec.shape)
