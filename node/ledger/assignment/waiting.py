"""Requests for work that could not be filled yet, and which of them are worth another look. Times are arguments."""

from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from node.ledger.messages import WorkRequest

__all__ = ["Waiting"]

LOOK_AGAIN_S: Final = 1.0
"""Whoever waits for work is looked at so often at least while anything happens."""
LOOKS_A_TURN: Final = 16
"""A look takes up to five milliseconds where there is much work that does not fit, and the loop has more to do."""
TURN_S: Final = 0.05
"""Requests that were more than their node's budget are looked at this often."""


class Waiting:
    """One request a node, the newest."""

    def __init__(self) -> None:
        self._requests: dict[bytes, tuple[WorkRequest, float]] = {}
        """And when they came."""
        self._stirred: set[bytes] = set()
        """Nodes whose standing has changed since their requests were looked at."""
        self._left_over: dict[bytes, None] = {}
        """Whose requests were not looked at in the last turn, because it had enough."""
        self._postponed = False
        """A request was more than its node's budget, and waits for that."""
        self._looked: object = None
        self._look_again = float("-inf")

    def put(self, node: bytes, request: WorkRequest, received: float) -> None:
        self._requests[node] = request, received

    def pop(self, node: bytes) -> tuple[WorkRequest, float] | None:
        return self._requests.pop(node, None)

    def stir(self, node: bytes) -> None:
        """There may be work for it now."""
        self._stirred.add(node)

    def postpone(self, node: bytes, request: WorkRequest, received: float) -> None:
        """It has asked more often than its budget allows: its newest request is looked at when that allows it."""
        known = self._requests.get(node)
        if known is None or known[0].serial <= request.serial:
            self.put(node, request, received)
        self._stirred.add(node)
        self._postponed = True

    def narrow(self, node: bytes, request: WorkRequest, received: float, left: int, holding: tuple[int, ...]) -> None:
        """What a request still asks for, after it got some of it."""
        self.put(node, replace(request, capacity=left, holding=holding), received)

    def wait_s(self) -> float | None:
        """After how long the next turn is due; None: when something happens."""
        if self._left_over:
            return 0.0
        return TURN_S if self._postponed else None

    def next(self, state: object, speed: Callable[[bytes], float], now: float) -> list[bytes]:
        """Those whose requests are looked at in this turn: who was left over from the last one, then the fastest.

        All who wait, when there is more work or a new version (`state` differs), or after a while (shares shift, a
        session's node was waited for); else those who were stirred. A look at every one whenever anything happens
        would be most of what a busy ledger does.
        """
        hopeful: Iterable[bytes] = self._requests
        if state == self._looked and now < self._look_again:
            hopeful = self._stirred
        else:
            self._looked, self._look_again = state, now + LOOK_AGAIN_S
        waiting = (node for node in hopeful if node in self._requests and node not in self._left_over)
        found = [node for node in self._left_over if node in self._requests]
        found += sorted(sorted(waiting), key=lambda node: -speed(node))
        self._stirred, self._postponed = set(), False
        self._left_over = dict.fromkeys(found[LOOKS_A_TURN:])
        return found[:LOOKS_A_TURN]
