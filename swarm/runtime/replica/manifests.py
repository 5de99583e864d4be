"""The verified manifests of recent versions: which root is which version, and back.

The core decides what follows from a manifest. The runtime needs manifests too, because a job names a version, a hash
list names a root, and a block is labelled with a version: each must be checked against what the authority signed, never
against what a peer says.
"""

from functools import lru_cache
from typing import Final

from codec import Manifest, open_manifest
from swarm.protocol.core.events import VersionId

__all__ = ["Manifests"]

_KEPT: Final = 1024
"""Versions whose manifests stay in memory, sealed: opened, they would take three times as much."""
_open_again: Final = lru_cache(maxsize=64)(open_manifest)
"""Of those, the ones that were needed last, opened."""


class Manifests:
    """Verified manifests of the `_KEPT` newest versions. `authority`: the key that signed them."""

    def __init__(self, authority: bytes) -> None:
        self.authority = authority
        self._by_id: dict[VersionId, tuple[bytes, bytes]] = {}
        """Root and sealed manifest of each version."""
        self._by_root: dict[bytes, VersionId] = {}

    def note(self, sealed: bytes) -> Manifest:
        """Remember a sealed manifest. Of two for one version the first stays. Raises `PeerError` when it is forged."""
        manifest = open_manifest(sealed, self.authority)
        id_ = VersionId(manifest.epoch, manifest.version)
        if id_ not in self._by_id:
            self._by_id[id_] = manifest.root, sealed
            self._by_root[manifest.root] = max(id_, self._by_root.get(manifest.root, id_))
            if len(self._by_id) > _KEPT:
                oldest = min(self._by_id)  # a peer that replays old manifests must not displace new ones
                root, _ = self._by_id.pop(oldest)
                if self._by_root.get(root) == oldest:
                    del self._by_root[root]
        return manifest

    def get(self, version: VersionId) -> tuple[Manifest, bytes] | None:
        """The manifest of `version` and its sealed bytes."""
        found = self._by_id.get(version)
        return None if found is None else (_open_again(found[1], self.authority), found[1])

    def root(self, version: VersionId) -> bytes | None:
        """The root of `version`."""
        found = self._by_id.get(version)
        return None if found is None else found[0]

    def version(self, root: bytes) -> VersionId | None:
        """The newest known version with this root."""
        return self._by_root.get(root)
