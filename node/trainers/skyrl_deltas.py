"""The folders in which SkyRL writes its versions, each as deltas of the version before it. As of SkyRL 0.4.0."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from codec.errors import UsageError
from node.trainers.delta_publisher import DeltaPublisher, TensorDelta

__all__ = ["publish_folder"]


class _Record(msgspec.Struct):
    name: str
    payload_file: str
    payload_key: str
    checksum: str
    checksum_algorithm: str


class _Manifest(msgspec.Struct):
    version: int
    base_version: int
    tensors: list[_Record]


def publish_folder(publisher: DeltaPublisher, folder: Path, number: int) -> None:
    """Publish SkyRL's version `number`. `folder`: its sync_dir.

    Raises `UsageError` when it cannot be read, and what `DeltaPublisher.publish_deltas` raises.
    """
    here = folder / f"delta-{number:08d}"
    try:
        manifest = msgspec.json.decode((here / "manifest.json").read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{here} is no version of SkyRL that this host can read: {error}") from error
    publisher.publish_deltas(number, manifest.base_version, _deltas(here, manifest.tensors), "xor")


def _deltas(folder: Path, records: list[_Record]) -> Iterator[TensorDelta]:
    from safetensors import safe_open  # a dependency of SkyRL

    for record in records:
        with safe_open(folder / Path(record.payload_file).name, "numpy") as stored:
            delta = stored.get_tensor(record.payload_key)
            yield TensorDelta(record.name, delta, record.checksum_algorithm, record.checksum)
