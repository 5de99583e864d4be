"""A child's end of the trees: it attaches to one parent in each stripe, and grants it credit.

The child grants slightly more than a stripe brings in a round trip, and then as many bytes as arrive: credit shows
progress, which a socket's acceptance does not. Small windows keep the queues of a shared uplink short, and the children
at the same pace; with large windows, the child with the shortest round trip would take what the others wait for.
"""

from collections.abc import Callable

from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Attach, Credit, Detach
from swarm.protocol.transfer.chunks import Chunks
from swarm.protocol.transfer.edges import BEHIND_BYTES, ParentEdge

__all__ = ["Parents"]

FAR_S = 0.05
FAR_TIMES = 2
"""Above `FAR_S` of round-trip time, a parent that owes at least 1.5 windows gets a window `FAR_TIMES` as large. Such a
stream reaches its rate late, and often feeds a whole region, so that no near neighbour can help; with credit for its
usual rate only, it would never make up the delay."""
CREDIT_STEP_BYTES = 128 << 10
"""Credit is granted in steps of a quarter window, but at least this: two pieces per message."""
FAILOVER_PATIENCE_S = 0.4
"""A failover parent brings what it has within this time; the rest is pulled from others."""


class Parents:
    """The parents of one peer."""

    def __init__(
        self,
        chunks: Chunks,
        tuning: Tuning,
        outbox: Outbox,
        rtt_s: Callable[[bytes], float],
        behind: Callable[[int], int],
    ) -> None:
        """`rtt_s(peer)`: the round trip in seconds, 0 if unknown. `behind(stripe)`: bytes queued for a child, on
        average."""
        self._chunks = chunks
        self._tuning = tuning
        self._outbox = outbox
        self._rtt_s = rtt_s
        self._behind = behind
        self.edges: dict[int, ParentEdge] = {}
        """By stripe."""
        self._piece_bytes = 0
        """The piece size of the newest chunk known."""
        self._owed_bytes: dict[int, int] = {}
        """By stripe: bytes that our parent owes; see `note_owed`."""
        self.progress_at: dict[int, float] = {}
        """By stripe: local time of the last progress; set earlier for stripes that are to be pulled sooner."""
        self._patient_s: dict[int, float] = {}
        """By stripe: time without progress after which it is pulled."""

    def attach_to(self, stripe: int, peer: bytes, after: VersionId, now: float, *, failover: bool = False) -> None:
        """Attach to `peer` as the only parent in this stripe.

        `failover`: `peer` replaces a lost parent. It may lack what that one owed, so that is pulled soon.
        """
        old = self.edges.get(stripe)
        if old is not None and old.peer != peer:
            self._outbox.send(old.peer, Detach(stripe))
        window = self._window(stripe, peer)
        self.edges[stripe] = ParentEdge(peer, 0, window, now)
        self._patient_s[stripe] = (
            max(FAILOVER_PATIENCE_S, 3 * self._rtt_s(peer)) if failover else self._tuning.pull_after_s
        )
        self._moved(stripe, now)
        self._outbox.send(peer, Attach(stripe, after.epoch, after.version, window, self._chunks.haves(after)))

    def _window(self, stripe: int, peer: bytes) -> int:
        """Credit for an edge: what a stripe brings in a round trip, plus 20 ms and two pieces.

        A larger window would only fill queues, and let this child take what its siblings wait for. See `FAR_S`.
        """
        tuning = self._tuning
        rtt_s = self._rtt_s(peer)
        least = max(tuning.window_least_bytes, 2 * self._piece_bytes)
        window = least + int(tuning.stripe_bytes_s * ((rtt_s or tuning.rtt_guess_s) + 0.02))
        if rtt_s > FAR_S and 2 * self._owed_bytes.get(stripe, 0) > 3 * window:
            window *= FAR_TIMES
        return min(tuning.window_bytes, window)

    @property
    def patient_s(self) -> float:
        """How long a header may be missing that other stripes have passed: less after a parent was lost."""
        return min(self._patient_s.values(), default=self._tuning.pull_after_s)

    def _moved(self, stripe: int, now: float) -> None:
        patient_s = min(self._patient_s.get(stripe, self._tuning.pull_after_s), self._tuning.pull_after_s)
        self.progress_at[stripe] = now + patient_s - self._tuning.pull_after_s

    def parent(self, stripe: int) -> bytes | None:
        """The peer that pushes this stripe to us."""
        edge = self.edges.get(stripe)
        return None if edge is None else edge.peer

    def note_owed(self, stripe: int, size: int) -> None:
        """Our parent in this stripe owes us `size` bytes: a far one that owes much gets more credit."""
        self._owed_bytes[stripe] = size

    def lost(self, peer: bytes) -> list[int]:
        """`peer` is gone: detach; the stripes in which it was our parent."""
        stripes = [s for s, edge in self.edges.items() if edge.peer == peer]
        for stripe in stripes:
            del self.edges[stripe]
        return stripes

    def arrived(self, peer: bytes | None, stripe: int | None, size: int, now: float) -> None:
        """`size` bytes of a stripe came from `peer`. Duplicates count too, since they use up credit.

        The frame that names `stripe` is not signed, so it counts only if `peer` is our parent there.
        """
        edge = self.edges.get(stripe) if stripe is not None else None
        if stripe is not None and edge is not None and edge.peer == peer:
            edge.received += size
            self._moved(stripe, now)
            self.give_credit(stripe)

    def moved(self, stripe: int | None, now: float) -> None:
        """A new header or piece of this stripe came, from any peer: the stripe makes progress."""
        if stripe is not None:
            self._moved(stripe, now)

    def give_credit(self, stripe: int) -> None:
        """Grant our parent as many bytes as have come, and report how far behind our own children are."""
        edge = self.edges.get(stripe)
        if edge is None or edge.received + self._tuning.window_bytes < edge.allowed + CREDIT_STEP_BYTES:
            return
        window = self._window(stripe, edge.peer)
        allowed = edge.received + window
        if allowed >= edge.allowed + max(window // 4, CREDIT_STEP_BYTES):
            edge.allowed, edge.behind = allowed, self._behind(stripe)
            self._outbox.send(edge.peer, Credit(stripe, allowed, edge.behind))

    def report_not_behind(self, stripe: int) -> None:
        """Report that our children are not behind any more, as no credit may be due that would tell it."""
        edge = self.edges.get(stripe)
        if edge is None or edge.behind < BEHIND_BYTES:
            return
        behind = self._behind(stripe)
        if behind < BEHIND_BYTES // 2:
            edge.behind = behind
            self._outbox.send(edge.peer, Credit(stripe, edge.allowed, behind))

    def note_piece_size(self, size: int) -> None:
        """Note the size of pieces. If it grew, grant credit at once: what is left may not suffice for one piece."""
        larger, self._piece_bytes = size > self._piece_bytes, size
        for stripe in self.edges if larger else ():
            self.give_credit(stripe)
