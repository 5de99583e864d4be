"""The requests for work that could not be filled yet, and which of them the ledger should try again. Pure."""

from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from node.ledger.messages import WorkRequest

__all__ = ["PendingRequests"]

TRY_ALL_S: Final = 1.0
"""While anything happens, each pending request is tried at least this often."""
TRIES_A_TURN: Final = 16
"""A try takes up to five milliseconds where much work does not fit the node, and the event loop has more to do."""
TURN_S: Final = 0.05
"""Requests that exceeded their node's budget are tried this often."""


class PendingRequests:
    """The newest pending request of each node."""

    def __init__(self) -> None:
        self._requests: dict[bytes, tuple[WorkRequest, float]] = {}
        """By node: the request, and when it came."""
        self._changed: set[bytes] = set()
        """Nodes whose state has changed since their requests were tried."""
        self._left_over: dict[bytes, None] = {}
        """Nodes whose requests were due in the last turn, beyond `TRIES_A_TURN`, in order."""
        self._postponed = False
        """Some request exceeds its node's budget, and waits for it."""
        self._tried_state: object = None
        self._try_all_at = float("-inf")

    def put(self, node: bytes, request: WorkRequest, received: float) -> None:
        """Replace the pending request of `node`."""
        self._requests[node] = request, received

    def pop(self, node: bytes) -> tuple[WorkRequest, float] | None:
        """Remove the request of `node`. Returns it, and when it came."""
        return self._requests.pop(node, None)

    def try_soon(self, node: bytes) -> None:
        """Try the request of `node` in the next turn: there may be work for it now."""
        self._changed.add(node)

    def postpone(self, node: bytes, request: WorkRequest, received: float) -> None:
        """Keep a request that exceeds its node's budget, unless a newer one is pending."""
        known = self._requests.get(node)
        if known is None or known[0].serial <= request.serial:
            self.put(node, request, received)
        self._changed.add(node)
        self._postponed = True

    def narrow(self, node: bytes, request: WorkRequest, received: float, left: int, holding: tuple[int, ...]) -> None:
        """Keep what a partly filled request still asks for: `left` sequences, while the node holds `holding`."""
        self.put(node, replace(request, capacity=left, holding=holding), received)

    def wait_s(self) -> float | None:
        """Seconds until the next turn is due; None: when something happens."""
        if self._left_over:
            return 0.0
        return TURN_S if self._postponed else None

    def next(self, state: object, speed: Callable[[bytes], float], now: float) -> list[bytes]:
        """The nodes whose requests are tried in this turn: those left over from the last turn, then the fastest.

        All nodes are candidates when there is more work or a new version (`state` differs from the last turn's), and
        every `TRY_ALL_S` (shares shift, and groups stop waiting for their session's node); otherwise only those passed
        to `try_soon`. A busy ledger would spend most of its time on trying all requests at every event.
        """
        candidates: Iterable[bytes] = self._requests
        if state == self._tried_state and now < self._try_all_at:
            candidates = self._changed
        else:
            self._tried_state, self._try_all_at = state, now + TRY_ALL_S
        due = (node for node in candidates if node in self._requests and node not in self._left_over)
        found = [node for node in self._left_over if node in self._requests]
        found += sorted(sorted(due), key=lambda node: -speed(node))
        self._changed, self._postponed = set(), False
        self._left_over = dict.fromkeys(found[TRIES_A_TURN:])
        return found[:TRIES_A_TURN]
