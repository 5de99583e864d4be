"""Signs of life of a node that has work: is it still there, and do its tokens flow? Pure.

A lease's deadline is as long as its node may need. Somebody who was killed, or whose engine hangs, is known much
sooner: a node speaks at least every five seconds, and shows new tokens every three where its engine counts them. Who
does neither for several times as long loses its work to others, and whoever only hangs gets one group at a time until
its tokens flow again.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from node.ledger.settings import Settings

__all__ = ["Liveness", "Lost"]

Lost = Literal["silent", "stalled"]
SPEAKS_EVERY_S: Final = 5.0
"""A node that has nothing else to say repeats its request for work."""
SOONEST: Final = 0.6
"""Whose words come closer together is missed sooner, but never before this share of `Settings.silent_s`: what a
connection that lost something may take to recover."""
GAP_KEPT: Final = 0.99
"""Of the longest gap, at each show of tokens: a half after some three minutes, so that one that each commit makes is
remembered from one to the next."""
WORD_S: Final = 1.0
"""Words that come closer together are one."""


@dataclass(slots=True)
class Liveness:
    """Times are the ledger's clock, s."""

    heard: float = float("-inf")
    """When it last said anything."""
    quiet_s: float = SPEAKS_EVERY_S
    """The longest time between two of its words, lately."""
    flowed: float = float("-inf")
    """When it last had new tokens to show, or was given work after having had none."""
    counts: bool = False
    """Its engine says how far it is: only then do missing tokens mean anything before a deadline."""
    gap_s: float = 0.0
    """The longest time between two shows of tokens, lately: commits and long prompts take theirs."""
    stalled: bool = False
    """It had work and showed no tokens, and has shown none since."""
    _doubted: float | None = None

    def hear(self, now: float) -> None:
        if WORD_S <= (gap_s := now - self.heard) < math.inf:
            self.quiet_s = max(0.9 * self.quiet_s, gap_s)
        self.heard = max(self.heard, now)

    def begin(self, now: float) -> None:
        """It had nothing to do, and was given work."""
        self.flowed = max(self.flowed, now)

    def flow(self, now: float, *, counted: bool) -> None:
        """New tokens. `counted`: of sequences that are not done."""
        self.gap_s = max(GAP_KEPT * self.gap_s, now - self.flowed)
        self.flowed, self.stalled = now, False
        self.counts = self.counts or counted

    def look_at(self, settings: Settings) -> float:
        """When it should be looked at: `lost` says nothing before."""
        at = self._overdue_at(settings)
        return at if self._doubted is None else max(at, self._doubted + settings.doubt_s)

    def lost(self, now: float, settings: Settings) -> Lost | None:
        """Is its work to go to others? One that is overdue is doubted first, for a moment: it may be us who slept, and
        what it said lies unread."""
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
