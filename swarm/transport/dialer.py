"""Dials a peer at its addresses, each a little after the one before, and backs off from a peer that does not answer."""

import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.connection.muxer import MuxedConnection
from swarm.transport.identity import peer_id

__all__ = ["DialRules", "Dialer"]

_MAX_ADDRESSES: Final = 16
"""Addresses of one peer that are dialed; the rest of a longer list is ignored. Lists come from other peers."""
_MAX_BACKOFFS: Final = 1024
"""Peers whose failures are remembered, the latest ones. Other peers may name any number of peers that do not exist."""
_FORGET_S: Final = 600.0
"""A backoff that ended this long ago is forgotten."""


@dataclass(frozen=True, slots=True)
class DialRules:
    """Time limits of dialing, and the back-off after failures."""

    handshake_s: float = 10.0
    """For security and for the muxer each; the limit also of inbound connections (`upgrade.ANSWER_S` is lower)."""

    address_s: float = 12.0
    """For one address in all."""

    stagger_s: float = 0.5
    """The next address is dialed after this time, beside the ones that have not answered yet."""

    backoff_first_s: float = 0.5
    backoff_most_s: float = 30.0
    """The n-th dial in a row that fails is the last one for `backoff_first_s` x 2^(n-1), at most `backoff_most_s`,
    less up to half at random. That time begins with the dial, which may have waited longer for an answer."""


@dataclass(slots=True)
class _Backoff:
    failures: int = 0
    until_s: float = 0.0
    why: str = ""


class Dialer:
    """One for a transport."""

    def __init__(self, rules: DialRules, attempt: Callable[[PeerKey, str], Awaitable[MuxedConnection]]) -> None:
        """`attempt`: dials one address of a peer; may raise anything."""
        self._rules = rules
        self._attempt = attempt
        self._backoff: dict[PeerKey, _Backoff] = {}

    def forgive(self, peer: PeerKey) -> None:
        """Forget the peer's failures: it is connected (it may have dialed us)."""
        self._backoff.pop(peer, None)

    async def dial(self, peer: PeerKey, addrs: Sequence[str]) -> MuxedConnection:
        """A new connection to the first address that answers as `peer`. Raises `Unreachable`."""
        backoff = self._backoff.get(peer, _Backoff())
        began_s = trio.current_time()
        wait_s = backoff.until_s - began_s
        if wait_s > 0:
            raise Unreachable(f"{backoff.why}; next try in {wait_s:.1f} s")
        if not addrs:
            raise Unreachable(f"no address of {peer_id(peer)} is known")
        found: list[MuxedConnection] = []
        failures: list[str] = []
        async with trio.open_nursery() as nursery:

            async def try_one(address: str, failed: trio.Event) -> None:
                try:
                    with trio.fail_after(self._rules.address_s):
                        found.append(await self._attempt(peer, address))
                except Exception as error:  # any error of the library means that this address does not lead to the peer
                    failures.append(f"{address} ({_innermost(error)})")
                    failed.set()
                else:
                    nursery.cancel_scope.cancel()

            for address in addrs[:_MAX_ADDRESSES]:
                failed = trio.Event()
                nursery.start_soon(try_one, address, failed)
                with trio.move_on_after(self._rules.stagger_s):
                    await failed.wait()
        if found:
            self.forgive(peer)
            return found[0]
        backoff.why = f"{peer_id(peer)} does not answer: {'; '.join(failures)}"
        self._failed(peer, backoff, began_s)
        raise Unreachable(backoff.why)

    def _failed(self, peer: PeerKey, backoff: _Backoff, began_s: float) -> None:
        backoff.failures += 1
        longest_s = min(self._rules.backoff_most_s, self._rules.backoff_first_s * 2.0 ** min(backoff.failures - 1, 20))
        backoff.until_s = began_s + longest_s * random.uniform(0.5, 1.0)
        self._backoff.pop(peer, None)
        self._backoff[peer] = backoff
        if len(self._backoff) > _MAX_BACKOFFS:
            del self._backoff[next(iter(self._backoff))]
        forgotten_s = trio.current_time() - _FORGET_S
        for other in [other for other, each in self._backoff.items() if each.until_s < forgotten_s]:
            del self._backoff[other]


def _innermost(error: BaseException) -> str:
    """The text of the first cause: the library wraps errors several times, and trio groups those of its attempts."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        elif isinstance(error, OSError) and error.errno:
            return os.strerror(error.errno)
        else:
            return str(error) or type(error).__name__
