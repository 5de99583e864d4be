"""What becomes of a header or piece that arrives, before its bytes are looked at. Pure.

The runtime (`swarm.runtime.sessions.inbound`) and the simulator (`scenarios.sim.virtual.network`) both ask these
functions, so that the simulator cannot have rules of its own.
"""

from enum import Enum

from swarm.protocol.core.version import VersionId

__all__ = ["Arrival", "header_arrival", "piece_arrival"]


class Arrival(Enum):
    """What is to be done with it."""

    NEW = "new"
    """Verify and store it."""
    DUPLICATE = "duplicate"
    """It is here already: only its credit is returned."""
    STRAY = "stray"
    """Throw it away: it is of a version or an attempt that is over, and the sender is not to blame."""
    WRONG = "wrong"
    """No honest peer sends it."""


def header_arrival(version: VersionId, applied: VersionId | None, *, known: bool, same: bool) -> Arrival:
    """Of a chunk's header of `version`. `applied`: the newest version that the replica has become. `known`: a header
    of this key is stored, and `same`: with these very bytes. Of two headers of one key the first one counts: the
    authority signed both."""
    if known and same:
        return Arrival.DUPLICATE
    return Arrival.STRAY if known or _is_over(version, applied) else Arrival.NEW


def piece_arrival(
    version: VersionId, applied: VersionId | None, *, known: bool, bodiless: bool, here: bool, dropped: bool
) -> Arrival:
    """Of a piece of a chunk of `version`. `known`: the chunk's header is stored. `bodiless`: no piece of the chunk is
    needed. `here`: the piece is stored. `dropped`: the attempt was dropped lately."""
    if not known:
        return Arrival.STRAY if dropped or _is_over(version, applied) else Arrival.WRONG
    if bodiless:
        return Arrival.STRAY
    return Arrival.DUPLICATE if here else Arrival.NEW


def _is_over(version: VersionId, applied: VersionId | None) -> bool:
    """Whether `version` is applied: a late duplicate, or a replay of what was once signed."""
    return applied is not None and version <= applied
