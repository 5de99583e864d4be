"""What the leader of a council knows of the other machines: what they have stored, and when they lent it the lead."""

import math
from collections.abc import Iterable, Iterator

from swarm.protocol.council.messages import START, Position

__all__ = ["Follower", "Followers"]


class Follower:
    """One other machine, as its leader sees it."""

    __slots__ = ("lent_at", "matched", "progress_at", "rewound_at", "sent", "snapshot_at")

    def __init__(self, sent: Position, now: float) -> None:
        self.sent = sent
        """The position up to which entries were sent."""
        self.matched = START
        """The position up to which it is known to have stored this leader's log."""
        self.lent_at = -math.inf
        """The leader's clock when it sent the newest `Append` that this machine has answered."""
        self.progress_at = now
        """When it acknowledged something new, or had nothing to acknowledge."""
        self.rewound_at = -math.inf
        """When sending began again at `matched`, because an earlier message had not arrived."""
        self.snapshot_at = -math.inf
        """When it was last sent a snapshot."""


class Followers:
    """All other machines of the council, during one term of its leader."""

    def __init__(self, others: Iterable[bytes], sent: Position, now: float) -> None:
        self._followers = {peer: Follower(sent, now) for peer in others}
        self._majority = (len(self._followers) + 1) // 2 + 1

    def __iter__(self) -> Iterator[tuple[bytes, Follower]]:
        return iter(self._followers.items())

    def __getitem__(self, peer: bytes) -> Follower:
        return self._followers[peer]

    def lent_at(self, now: float) -> float:
        """The leader's clock at the newest time at or after which a majority, the leader included, has lent the
        lead."""
        return sorted((now, *(each.lent_at for each in self._followers.values())), reverse=True)[self._majority - 1]

    def stored_by_majority(self, last: int) -> int:
        """The highest index that a majority has stored; `last`: the leader's own."""
        return sorted((last, *(each.matched.index for each in self._followers.values())), reverse=True)[
            self._majority - 1
        ]
