"""A policy version's number."""

from typing import NamedTuple

__all__ = ["VersionId"]


class VersionId(NamedTuple):
    """A policy version: ordered by (epoch, version)."""

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.version}"
