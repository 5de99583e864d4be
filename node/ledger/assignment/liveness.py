"""Whether a node that has work is alive and generates. Pure.

The deadline of a lease is as long as its node may need. A node that was killed, or whose engine hangs, is found much
sooner: a node sends something at least every five seconds, and reports new tokens every three where its engine counts
them. A node that does neither for several times as long loses its work to other nodes. A node that only stalls gets one
group at a time until it reports tokens again.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from node.ledger.settings import Settings

__all__ = ["Liveness", "Lost"]

Lost = Literal["silent", "stalled"]
SPEAKS_EVERY_S: Final = 5.0
"""A node that has nothing else to send repeats its request for work this often."""
SOONEST: Final = 0.6
"""A node that normally sends often is declared silent sooner, but never before this share of `Settings.silent_s`: a
connection that lost a packet may take as long to recover."""
GAP_KEPT: Final = 0.99
"""The longest gap decays by this factor at each report of tokens, to a half after some three minutes. So the gap that
each commit makes is remembered from one commit to the next."""
WORD_S: Final = 1.0
"""Messages that follow each other more closely count as one."""


@dataclass(slots=True)
class Liveness:
    """One node's. Times are the ledger's clock, in seconds."""

    heard: float = float("-inf")
    """When its last message came."""
    quiet_s: float = SPEAKS_EVERY_S
    """The longest recent time between two of its messages."""
    flowed: float = float("-inf")
    """When it last reported new tokens, or got work after it had none."""
    counts: bool = False
    """Its engine reports progress; only then do missing tokens mean anything before a deadline."""
    gap_s: float = 0.0
    """The longest recent time between two reports of tokens; commits and long prompts take theirs."""
    stalled: bool = False
    """It had work and reported no tokens for too long, and has reported none since."""
    _doubted: float | None = None
    """Since when it is overdue."""

    def hear(self, now: float) -> None:
        """A message came."""
        if WORD_S <= (gap_s := now - self.heard) < math.inf:
            self.quiet_s = max(0.9 * self.quiet_s, gap_s)
        self.heard = max(self.heard, now)

    def begin(self, now: float) -> None:
        """It had no work, and got some."""
        self.flowed = max(self.flowed, now)

    def flow(self, now: float, *, counted: bool) -> None:
        """It reported new tokens. `counted`: of sequences that are not finished."""
        self.gap_s = max(GAP_KEPT * self.gap_s, now - self.flowed)
        self.flowed, self.stalled = now, False
        self.counts = self.counts or counted

    def check_at(self, settings: Settings) -> float:
        """When to call `lost` next; it returns None before."""
        at = self._overdue_at(settings)
        return at if self._doubted is None else max(at, self._doubted + settings.doubt_s)

    def lost(self, now: float, settings: Settings) -> Lost | None:
        """Why the node's work should go to other nodes, if it should.

        A node that is overdue is first doubted for `Settings.doubt_s`: perhaps the ledger's process slept, and the
        node's messages are still unread.
        """
        if now < self._overdue_at(settings):
            self._doubted = None
            return None
        if self._doubted is None:
            self._doubted = now
        if now < self._doubted + settings.doubt_s:
            return None
        self._doubted = None
        if now >= self._silent_at(settings):
            return "silent"
        self.stalled = True
        return "stalled"

    def _silent_at(self, settings: Settings) -> float:
        return self.heard + settings.silent_s * min(1.0, max(SOONEST, self.quiet_s / SPEAKS_EVERY_S))

    def _overdue_at(self, settings: Settings) -> float:
        silent_at = self._silent_at(settings)
        if not self.counts:
            return silent_at
        return min(silent_at, self.flowed + max(settings.stall_s, 3.0 * self.gap_s))
