"""How far the other ranks of this trainer are with a publish, as read from the memory that all ranks share."""

import time
from typing import Final

from node.trainers.connection.link import RankInfo
from node.trainers.connection.patience import Wait
from node.trainers.connection.seedwatch import RECONNECT_S
from node.trainers.errors import PublishFailed, SwarmTimeout
from node.trainers.ranks.copies import LOOK_S, Copies, Decision
from node.trainers.ranks.peers import RankPeers, have, named

__all__ = ["RankProgress"]

FIRST: Final = [0]
"""Rank 0 decides into which copy a publish goes, and begins the version."""


class RankProgress:
    """How far the other ranks are with a publish, and whether one has ended. A publish is named by slot and number."""

    def __init__(self, rank_info: RankInfo, copies: Copies, peers: RankPeers) -> None:
        """`peers`: the processes of all ranks."""
        self.world = rank_info.world
        self.first = named(FIRST, rank_info.world)
        self._rank, self._copies, self._peers = rank_info.rank, copies, peers

    def check(self, slot: int, number: int, what: str) -> None:
        """Raises `PublishFailed` when a rank cannot copy its weights, or ended before it had sent all of its blocks."""
        self._copies.check(slot, number)
        self._check_alive(set(self._copies.unsent(slot, number)), what)

    def check_all(self, what: str) -> None:
        """Raises `PublishFailed` when a rank has ended."""
        self._check_alive(set(range(self.world)), what)

    def _check_alive(self, needed: set[int], what: str) -> None:
        if ended := [rank for rank in self._peers.ended() if rank in needed]:
            subject = named(ended, self.world).capitalize()
            raise PublishFailed(f"{subject} {have(ended)} ended, so {what} was not published.")

    def uncopied(self, slot: int, number: int) -> list[int]:
        """Ranks that have not copied their weights, most likely because they have not published this step."""
        return self._copies.uncopied(slot, number)

    def describe_wait(self, slot: int, number: int, what: str, seed: str) -> str:
        """What an open version waits for: this process, other ranks or `seed`, and what they have to do."""
        uncopied, unsent = self._copies.uncopied(slot, number), self._copies.unsent(slot, number)
        if self._rank in uncopied:
            return f"this process to copy {what}"
        if uncopied:
            return f"{named(uncopied, self.world)}, which {have(uncopied)} not published {what}"
        if self._rank in unsent:
            return f"this process to encode {what}, and {seed} to take it"
        if unsent:
            return f"{named(unsent, self.world)} to send its part of {what}"
        return f"{seed} to seal {what}"

    def await_decision(self, number: int, step: int, timeout_s: float) -> Decision:
        """What rank 0 decides on a publish. Raises `PublishFailed` when rank 0 has ended, `SwarmTimeout`."""
        wait = Wait(timeout_s + RECONNECT_S, lambda: f"step {step} waits for {self.first}, which has not published it")
        while (decision := self._copies.decision(number)) is None:
            if 0 in self._peers.ended():
                raise PublishFailed(f"{self.first.capitalize()} has ended, so step {step} was not published.")
            if wait.over:
                raise SwarmTimeout(
                    f"{self.first.capitalize()} has not published step {step} within {wait.timeout_s:.0f} s of this "
                    "rank. Every rank must publish each step."
                )
            wait.log_if_due()
            time.sleep(LOOK_S)
        return decision

    def close(self) -> None:
        """Stop watching the other processes. Safe to call twice."""
        self._peers.close()
