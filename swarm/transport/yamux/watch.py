"""When a connection sends a ping, and when it gives its peer up: pure deadlines, so that an idle connection sleeps."""

import math
from typing import Final

from swarm.transport.yamux.cost import PeerBudget
from swarm.transport.yamux.limits import YamuxLimits

__all__ = ["Watch"]

_GRIDS_AN_INTERVAL: Final = 4
"""A ping is sent up to a fourth of `ping_interval_s` before it is due, at a multiple of that time: the connections of a
process then wake it together."""
_LONGEST_MEASURE_S: Final = 60.0
"""The longest time between two measurements of the round trip of an idle connection."""
_BUSY_BYTES: Final = 65_536
"""A connection that received as much since its last ping is in use: its round trip is measured at each
`ping_interval_s`, since windows grow by it."""


class Watch:
    """The pings and deadlines of one connection. Times are local, in seconds."""

    def __init__(self, peer: PeerBudget, now_s: float) -> None:
        self._peer = peer
        self.writing_since_s = math.inf
        """Since when the socket takes what is being written; infinite while nothing is."""
        self._began_at_s = now_s
        self._heard_bytes = 0  # since the last ping
        self._pinged_at_s = -math.inf
        self._answered_at_s = -math.inf
        self._is_waiting = False
        """Whether nothing has come since the last ping."""

    def note_heard(self, length: int, now_s: float) -> None:
        self._peer.heard_at_s = now_s
        self._heard_bytes += length
        self._is_waiting = False

    def note_ping(self, now_s: float) -> None:
        self._pinged_at_s = now_s
        self._heard_bytes = 0
        self._is_waiting = True

    def note_answered(self, now_s: float) -> None:
        """We answer a ping of the peer's: it has proved this path."""
        self._answered_at_s = now_s

    def is_ping_due(self, limits: YamuxLimits, now_s: float) -> bool:
        """Whether a ping is due now, or before the next multiple (see `_GRIDS_AN_INTERVAL`)."""
        grid_s = limits.ping_interval_s / _GRIDS_AN_INTERVAL
        return not self._is_waiting and now_s >= self._ping_at_s(limits) - grid_s

    def overdue(self, limits: YamuxLimits, now_s: float) -> str:
        """Why the peer counts as gone; empty while it does not."""
        if self._is_waiting and now_s >= self._pinged_at_s + limits.silence_s:
            return f"nothing heard from the peer for {limits.silence_s:g} s"
        if now_s >= self.writing_since_s + limits.write_stall_s:
            return f"the peer has taken nothing for {limits.write_stall_s:g} s"
        return ""

    def next_look_at_s(self, limits: YamuxLimits, now_s: float) -> float:
        """When to look again, for a peer that is not overdue and to which no ping is due."""
        if self._is_waiting:
            due_s = self._pinged_at_s + limits.silence_s
        else:
            ping_at_s, grid_s = self._ping_at_s(limits), limits.ping_interval_s / _GRIDS_AN_INTERVAL
            multiple_s = ping_at_s // grid_s * grid_s
            due_s = multiple_s if multiple_s > now_s else ping_at_s
        writing_since_s = now_s if math.isinf(self.writing_since_s) else self.writing_since_s
        return min(due_s, writing_since_s + limits.write_stall_s)

    def _ping_at_s(self, limits: YamuxLimits) -> float:
        """The next ping: when nothing came from the peer on any of its connections for `ping_interval_s`, or for a
        measurement, which an idle connection repeats at growing intervals. The measurement also finds a path that is
        dead while others to the same peer are not, and keeps NAT mappings alive. One end's is enough for both: the
        other end's answer must be acknowledged, or TCP ends the connection."""
        interval_s = limits.ping_interval_s
        if self._heard_bytes >= _BUSY_BYTES or math.isinf(self._pinged_at_s):
            measured_at_s, measure_s = self._pinged_at_s, interval_s
        else:
            measured_at_s = max(self._pinged_at_s, self._answered_at_s)
            measure_s = min(max(interval_s, measured_at_s - self._began_at_s), _LONGEST_MEASURE_S)
        return min(self._peer.heard_at_s + interval_s, measured_at_s + measure_s)
