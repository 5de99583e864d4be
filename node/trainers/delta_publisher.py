"""Publishes the versions that a trainer has written as deltas of its own, each of the version before it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from codec.bits import Bits
from codec.errors import UsageError
from node.trainers.api import Swarm
from node.trainers.disk_delta import applied, checksum
from node.trainers.publish_here import folder_tensors

__all__ = ["DeltaPublisher", "TensorDelta"]


class TensorDelta(NamedTuple):
    """`stored`: uint8, as `disk_delta.applied` takes it. `checksum`: of the tensor's new bytes, by `algorithm`."""

    name: str
    stored: Any
    algorithm: str
    checksum: str | None


class DeltaPublisher:
    """Publishes the versions of one run in their order, and waits until each is sealed."""

    def __init__(self, swarm: Swarm, timeout_s: float = 600.0) -> None:
        """`timeout_s`: for each wait."""
        self._swarm, self._timeout_s = swarm, timeout_s
        self.published: int | None = None
        """The trainer's number of the swarm's newest version; None: not known."""

    def publish_checkpoint(self, folder: Path, number: int) -> None:
        """Publish a whole checkpoint as version `number`. It costs nothing if the swarm's newest version has its bits.

        Raises what `folder_tensors`, `Swarm.publish` and `Publication.wait` raise.
        """
        self._publish(number, folder_tensors(folder, self._swarm.layout))

    def publish_deltas(self, number: int, of: int, deltas: Iterable[TensorDelta], encoding: str) -> None:
        """Publish version `number`: version `of` with these tensors changed. `encoding`: see `disk_delta.applied`.

        Raises `UsageError` when the swarm's newest version is not `of`, when a tensor does not get its checksum, and
        when the base lacks a tensor or it comes twice; and what `Swarm.publish` and `Publication.wait` raise.
        """
        if of != self.published:
            raise UsageError(
                f"Version {number} changes the trainer's version {of}, and the swarm's newest is {self.published}: "
                "start the trainer again, so that it begins with its base checkpoint."
            )
        self._publish(number, self._tensors(deltas, encoding))

    def _publish(self, number: int, tensors: Iterator[tuple[str, Bits]]) -> None:
        self.published = None
        self._swarm.publish(tensors, step=number, timeout_s=self._timeout_s).wait(timeout_s=self._timeout_s)
        self.published = number

    def _tensors(self, deltas: Iterable[TensorDelta], encoding: str) -> Iterator[tuple[str, Bits]]:
        """(name, bits) of every tensor: with its delta applied, or as the swarm has it."""
        specs = {name: spec for spec in self._swarm.layout.tensors for name in (spec.name, *spec.aliases)}
        changed: set[str] = set()
        for name, stored, algorithm, wanted in deltas:
            if name not in specs or specs[name].name in changed:
                raise UsageError(f"The trainer's version has {name}, which the base lacks, or has it twice.")
            spec = specs[name]
            new = applied(stored, self._swarm.bits(spec.name).reshape(-1).view(np.uint8), encoding)
            if checksum(algorithm, new) != wanted:
                raise UsageError(f"{name} does not get the trainer's checksum: start the trainer again.")
            changed.add(spec.name)
            yield name, new.view(spec.type.bits).reshape(spec.shape)
        for spec in self._swarm.layout.tensors:
            if spec.name not in changed:
                yield spec.name, self._swarm.bits(spec.name).reshape(spec.shape)
