"""The other ranks of a trainer as processes of this host: how messages name them, and which have ended."""

import contextlib
import os
import select
from collections.abc import Sequence

__all__ = ["RankPeers", "have", "named"]


def named(ranks: Sequence[int], world: int) -> str:
    """Ranks in words, such as "rank 3 of 8" or "ranks 3, 4 and 7 of 8"."""
    first = ", ".join(str(rank) for rank in ranks[:-1])
    last = str(ranks[-1])
    return f"ranks {first} and {last} of {world}" if first else f"rank {last} of {world}"


def have(ranks: Sequence[int]) -> str:
    """The verb that goes with `named`: "has" or "have"."""
    return "have" if len(ranks) > 1 else "has"


class RankPeers:
    """Watches the processes of other ranks by process file descriptors (pidfd).

    So neither a zombie nor a process id that the system has reused counts as alive. On a system without pidfds no rank
    is ever found to have ended.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """`pids`: process ids by rank, this process's among them."""
        self._watched: dict[int, int] = {}
        for rank, pid in enumerate(pids):
            if pid != os.getpid():
                with contextlib.suppress(OSError, AttributeError):
                    self._watched[rank] = os.pidfd_open(pid)
        self._poll = select.poll()
        self._ranks = {descriptor: rank for rank, descriptor in self._watched.items()}
        for descriptor in self._ranks:
            self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """Ranks whose process has ended, ascending."""
        return sorted(self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)) if self._ranks else []

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        while self._ranks:
            descriptor, _ = self._ranks.popitem()
            self._poll.unregister(descriptor)
            os.close(descriptor)
