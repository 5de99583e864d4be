"""The manifests that the authority has sealed, as far as we have seen them: which root is which version, and back.

The core decides what follows from a manifest. The shell needs them too, because a job names a version, a hash list
names a root, and a block is labelled with a version: each must be held against what was signed, never against what a
peer says.
"""

from typing import Final

from codec import Manifest, open_manifest
from swarm.protocol.core.events import VersionId

__all__ = ["Manifests"]

_KEPT: Final = 1024


class Manifests:
    """Verified manifests, the `_KEPT` newest versions."""

    def __init__(self, authority: bytes) -> None:
        self._authority = authority
        self._by_id: dict[VersionId, tuple[Manifest, bytes]] = {}
        self._by_root: dict[bytes, VersionId] = {}

    def note(self, sealed: bytes) -> Manifest:
        """Remember a sealed manifest. Of two for one version the first stays. Raises `PeerError` when it is forged."""
        manifest = open_manifest(sealed, self._authority)
        id_ = VersionId(manifest.epoch, manifest.version)
        if id_ not in self._by_id:
            self._by_id[id_] = manifest, sealed
            self._by_root[manifest.root] = max(id_, self._by_root.get(manifest.root, id_))
            if len(self._by_id) > _KEPT:
                oldest = min(self._by_id)  # whoever replays old ones must not push out new ones
                old, _ = self._by_id.pop(oldest)
                if self._by_root.get(old.root) == oldest:
                    del self._by_root[old.root]
        return manifest

    def get(self, version: VersionId) -> tuple[Manifest, bytes] | None:
        """The manifest of `version` and its sealed bytes."""
        return self._by_id.get(version)

    def root(self, version: VersionId) -> bytes | None:
        found = self._by_id.get(version)
        return None if found is None else found[0].root

    def version(self, root: bytes) -> VersionId | None:
        """The version whose root this is (the newest we heard of)."""
        return self._by_root.get(root)
