"""A checkpoint folder out of a member's home: the weights of the newest version that the home proves, bit for bit.

Any node has what it takes, so the weights of a swarm outlive its trainer, the seed and all of their disks. The home is
only read, beside the process that uses it or after it.
"""

from pathlib import Path
from typing import NamedTuple

from codec import Layered, Torn, open_manifest, write_checkpoint
from codec.errors import PeerError, UsageError
from codec.manifest import claimed_swarm
from codec.parts import base_layout
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.at_version import bits_of_version
from swarm.store import Seal, Store
from swarm.store.disk import Disk
from swarm.store.records import Records

__all__ = ["Rescued", "rescue"]


class Rescued(NamedTuple):
    """What was written. `swarm`: public key of the swarm that signed the version. `nbytes`: of the tensors."""

    swarm: bytes
    version: VersionId
    root: bytes
    nbytes: int
    newest: VersionId
    """The newest version whose seal the home has; it may be newer than the one that was written."""


def rescue(home: Path, out: Path, *, swarm: bytes | None = None, version: int | None = None) -> Rescued:
    """Write the newest version that `home` proves to the new folder `out`, as a checkpoint of the base model.

    `swarm`: the public key of the swarm; None: the one of which the home has the newest seal. `version`: only this one.
    Every block is compared with the hash that the root in the signed seal commits to. Raises `UsageError` when there is
    no such version, or `out` exists or cannot be written; then nothing is left in `out`.
    """
    found = _swarms(home)
    if swarm is not None:
        found = {key: folder for key, folder in found.items() if key == swarm}
    if not found:
        raise UsageError(f"{home} holds no version of such a swarm. Name a node's or seed's folder with --home.")
    key = max(found, key=lambda each: found[each][1])
    folder, newest = found[key]
    with Store(folder, key, beside=True) as store:
        for seal in reversed(store.records.seals()):
            if version is not None and seal.id.version != version:
                continue
            if (bits := bits_of_version(store, seal)) is not None and _is_signed(seal, bits, key):
                _write(store, bits, out)
                return Rescued(key, seal.id, seal.root, base_layout(bits.layout).nbytes, newest)
    which = "a version" if version is None else f"version {version}"
    raise UsageError(
        f"{folder} does not lead to {which} whose bits can be proven. Try the home of another node; a node that is "
        "catching up has no version yet."
    )


def _swarms(home: Path) -> dict[bytes, tuple[Path, VersionId]]:
    """By public key: the folder of each swarm in this home that has a seal, and the newest one's version."""
    found: dict[bytes, tuple[Path, VersionId]] = {}
    for folder in sorted(home.glob("swarm-*")):
        if not (folder / "swarm.sqlite").exists():
            continue
        records = Records(folder / "swarm.sqlite", Disk())
        try:
            seals = records.seals()
        finally:
            records.close()
        if not seals:
            continue
        key = claimed_swarm(seals[-1].manifest)
        if folder.name == f"swarm-{key.hex()[:16]}":
            found[key] = (folder, seals[-1].id)
    return found


def _is_signed(seal: Seal, bits: Layered, key: bytes) -> bool:
    try:
        manifest = open_manifest(seal.manifest, key)
    except PeerError:
        return False
    return manifest.root == seal.root == bits.root and manifest.layout_hash == bits.layout.hash


def _write(store: Store, bits: Layered, out: Path) -> None:
    layout = base_layout(bits.layout)
    files = {spec.name: store.file(spec.hash) for spec in layout.files}
    if lacking := sorted(name for name, data in files.items() if data is None):
        raise UsageError(f"{store.folder} lacks {', '.join(lacking)}. Try the home of another node.")
    try:
        found = {name: data for name, data in files.items() if data is not None}
        write_checkpoint(out, layout, bits.parts, found)
    except Torn as error:
        raise UsageError(
            f"{store.folder} changed or is damaged ({error}). Run it again; or try the home of another node."
        ) from error
