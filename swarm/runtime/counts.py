"""What crossed the wire, by kind: payload without frame heads, as the status page and the scenarios report it."""

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Bytes since the start."""

    pushed: int = 0
    """Headers and pieces sent down stripes."""
    pulled: int = 0
    """Headers and pieces sent because they were asked for."""
    blobs: int = 0
    """Parts of blobs and blocks sent."""
    control_sent: int = 0
    control_received: int = 0
    received: int = 0
    """Headers, pieces and parts that were news."""
    duplicates: int = 0
    """Headers and pieces that we had already."""
    stray: int = 0
    """What came for something dropped or given up meanwhile."""
    peers_dropped: int = 0
    """Peers whose bytes did not verify."""
