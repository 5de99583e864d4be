"""Bundles of accepted samples, made from a seed's home, and the weights to draw them again from.

Reads only, so it may run beside the seed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from codec import Layered, open_manifest
from codec.errors import UsageError
from node.engines.base import Version
from node.host.endpoint import store_folder
from node.ledger.accepted import AcceptedSample, AcceptedSamples
from node.ledger.bundle import OpenSample, SampleBundle
from node.settings.contact import Contact
from node.settings.units import version_text
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.at_version import bits_of_folder, bits_of_version
from swarm.store import Store

__all__ = ["Weights", "accepted_samples", "bundle_of", "weights_of"]


def accepted_samples(home: Path, count: int) -> list[AcceptedSample]:
    """The `count` samples that the seed's ledger accepted last. Raises `UsageError`."""
    with AcceptedSamples.beside(home / "ledger.sqlite") as samples:
        return samples.newest(count)


def bundle_of(home: Path, group: str, sample: int) -> SampleBundle:
    """The bundle of one accepted sample. `group`: the beginning of its number in hex. Raises `UsageError`."""
    with AcceptedSamples.beside(home / "ledger.sqlite") as samples:
        found = samples.find(group, sample)
    authority = Contact.read(home).authority
    with Store(store_folder(home, authority), authority, beside=True) as store:
        seals = tuple(_sealed(store, (span.epoch, span.version)) for span in found.rollout.spans)
        layout = store.file(open_manifest(seals[0], authority).layout_hash)
    if layout is None:
        raise UsageError(f"{home} does not have the list of the model's tensors any more.")
    return SampleBundle.of(
        authority, found.group, found.sample, found.prompt, found.leased, found.node, found.sealed, seals, layout
    )


def _sealed(store: Store, version: Version) -> bytes:
    """The signed manifest of a version."""
    seal = store.records.seal(VersionId(*version))
    if seal is None:
        raise UsageError(f"The seed no longer has the seal of version {version_text(version)}.")
    return seal.manifest


class Weights(NamedTuple):
    """`by_version`: the bits of each version of a sample. `model`: a folder with the model's config and tokenizer."""

    by_version: dict[Version, Layered]
    model: Path


@contextmanager
def weights_of(sample: OpenSample, folders: Sequence[Path], home: Path) -> Iterator[Weights]:
    """The weights that the sample was drawn from: those of these checkpoint folders, else those in `home`, which may be
    a seed's or a node's. Raises `UsageError` when a version is in none."""
    given = {bits.root: bits for bits in (bits_of_folder(folder, sample.layout) for folder in folders)}
    roots = {version: manifest.root for version, manifest in sample.manifests.items()}
    found = {version: given[root] for version, root in roots.items() if root in given}
    if len(found) == len(roots):
        yield Weights(found, folders[0])
        return
    authority = sample.bundle.authority
    with (
        Store(store_folder(home, authority), authority, beside=True) as store,
        TemporaryDirectory(prefix="swarm-replay-") as model,
    ):
        for version in roots.keys() - found.keys():
            found[version] = _kept(store, version, home)
        for spec in sample.layout.files:
            if (data := store.file(spec.hash)) is not None:
                Path(model, spec.name).write_bytes(data)
        yield Weights(found, folders[0] if folders else Path(model))


def _kept(store: Store, version: Version, home: Path) -> Layered:
    seal = store.records.seal(VersionId(*version))
    bits = None if seal is None else bits_of_version(store, seal)
    if bits is None:
        raise UsageError(
            f"{home} no longer keeps what leads to version {version_text(version)}. Give a checkpoint folder of that "
            "version with --weights."
        )
    return bits
