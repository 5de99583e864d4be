"""Payload bytes that crossed the wire, by kind, without frame headers, for the status page and the scenarios."""

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Bytes since the process started, and `peers_dropped`."""

    pushed: int = 0
    """Headers and pieces sent down stripes."""
    pulled: int = 0
    """Headers and pieces sent on request."""
    blobs: int = 0
    """Parts of blobs and blocks sent."""
    control_sent: int = 0
    received: int = 0
    """Headers, pieces and parts that this member did not have yet."""
    duplicates: int = 0
    """Headers and pieces that this member had already."""
    stray: int = 0
    """Payload of chunks and requests that were dropped or given up before it arrived."""
    peers_dropped: int = 0
    """Peers whose bytes did not verify (a number of peers, not bytes)."""
