"""The phases of a catch-up, and every transition between them.

`TRANSITIONS` is the only place where a phase follows from another: `Catchup` names what happened, and the table says
what comes next. A pair that is not in the table is a bug, and raises. `docs/protocol.md` shows the table as a
diagram (`python -m tools.diagrams`).
"""

from enum import Enum
from typing import Final

__all__ = ["TRANSITIONS", "Phase", "PhaseCause", "next_phase"]


class Phase(Enum):
    """The phase of a catch-up."""

    IDLE = "idle"
    """No catch-up is running."""
    LAYOUT = "layout"
    """The layout of the target, which names the model's tensors and files, is being fetched."""
    FILES = "files"
    """The files that the layout names and that we lack are being fetched."""
    OPEN = "open"
    """A job opens the replica: from the node's folder, or empty."""
    CHAIN = "chain"
    """Manifests of older versions are being fetched: our folder may be one of them."""
    HASHES = "hashes"
    """The target's list of block hashes is being fetched and compared with our blocks."""
    BLOCKS = "blocks"
    """Blocks that differ are being fetched."""
    REPLAY = "replay"
    """Jobs apply the chunks of later versions to blocks whose label is older."""


class PhaseCause(Enum):
    """What ends a phase; the texts are labels of the diagram (mermaid takes no colon in them)."""

    LAYOUT_UNKNOWN = "start, without the layout"
    LAYOUT_KNOWN = "start, with the layout"
    LAYOUT_STORED = "layout stored"
    FILES_STORED = "all files stored"
    NOT_OPENED = "the replica cannot be made"
    IS_TARGET = "our bits are the target"
    NO_CHAIN = "nothing older that it could be"
    PERHAPS_OLDER = "our bits may be an older version"
    CHAIN_FOUND = "our bits are a version that we have the manifest of"
    CHAIN_NOT_FOUND = "no such manifest in time"
    COMPARED = "hash list stored"
    BLOCKS_STORED = "all blocks stored"
    REPLAY_BAD = "some blocks do not match"
    REPLAYED = "all versions replayed"


_START: Final = {PhaseCause.LAYOUT_UNKNOWN: Phase.LAYOUT, PhaseCause.LAYOUT_KNOWN: Phase.HASHES}
"""Allowed in every phase: a catch-up may start, or restart with another target."""

TRANSITIONS: Final[dict[Phase, dict[PhaseCause, Phase]]] = {
    Phase.IDLE: _START,
    Phase.LAYOUT: _START | {PhaseCause.LAYOUT_STORED: Phase.FILES},
    Phase.FILES: _START | {PhaseCause.FILES_STORED: Phase.OPEN},
    Phase.OPEN: _START
    | {
        PhaseCause.NOT_OPENED: Phase.IDLE,
        PhaseCause.IS_TARGET: Phase.IDLE,
        PhaseCause.NO_CHAIN: Phase.HASHES,
        PhaseCause.PERHAPS_OLDER: Phase.CHAIN,
    },
    Phase.CHAIN: _START | {PhaseCause.CHAIN_FOUND: Phase.IDLE, PhaseCause.CHAIN_NOT_FOUND: Phase.HASHES},
    Phase.HASHES: _START | {PhaseCause.COMPARED: Phase.BLOCKS},
    Phase.BLOCKS: _START | {PhaseCause.BLOCKS_STORED: Phase.REPLAY},
    Phase.REPLAY: _START | {PhaseCause.REPLAY_BAD: Phase.BLOCKS, PhaseCause.REPLAYED: Phase.IDLE},
}


def next_phase(phase: Phase, cause: PhaseCause) -> Phase:
    """The phase that follows `phase`. Raises `RuntimeError` if `cause` cannot occur in it."""
    following = TRANSITIONS[phase].get(cause)
    if following is None:
        raise RuntimeError(f"a catch-up in phase {phase.value} cannot have: {cause.value}")
    return following
