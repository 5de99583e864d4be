"""The roots by which the seed knows the versions that this node's engine generates with.

An engine has the base alone, so the root of its bits is that of the base. What a node signs names the root of the whole
version. The two differ where the model has other parts (`codec.parts`).
"""

from collections import OrderedDict
from typing import Final

from node.engines.base import Version

__all__ = ["VersionRoots"]

KEPT: Final = 64
"""Versions: more than any rollout spans."""


class VersionRoots:
    """By version, its root. `told`: from the swarm; `engine`: from the engine, where the swarm has not told any."""

    def __init__(self) -> None:
        self._told: OrderedDict[Version, bytes] = OrderedDict()
        self._engine: OrderedDict[Version, bytes] = OrderedDict()

    def __contains__(self, version: Version) -> bool:
        return version in self._engine

    def __getitem__(self, version: Version) -> bytes:
        """Raises `KeyError` for a version that the engine never had."""
        return self._told.get(version, self._engine[version])

    def tell(self, version: Version, root: bytes) -> None:
        """The swarm's root of a version, which counts."""
        _note(self._told, version, root)

    def note_engine(self, version: Version, root: bytes) -> bytes:
        """The engine has a version, with this root of its bits. Returns the version's root."""
        _note(self._engine, version, root)
        return self[version]


def _note(roots: OrderedDict[Version, bytes], version: Version, root: bytes) -> None:
    roots[version] = root
    roots.move_to_end(version)
    while len(roots) > KEPT:
        roots.popitem(last=False)
