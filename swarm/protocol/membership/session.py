"""Sessions with peers, and dials with their back-off."""

import math
import random
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from codec.errors import PeerError
from codec.formats.share import Share
from swarm.protocol.core.bucket import Bucket
from swarm.protocol.core.events import Close, Dial
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Ping

__all__ = ["BACK_OFF_TIMES", "BAN_S", "Session", "Sessions", "pay_for_attaching"]

BAN_S = 600.0
"""Seconds for which a peer refuses another that sent it invalid bytes."""
BACK_OFF_TIMES = 16
"""The longest pause between failed dials to a peer, as a multiple of `Tuning.dial_retry_s`."""
QUICK_SHARE = 4
"""The shortest pause, whatever `Sessions.limit_back_off` says: this part of `Tuning.dial_retry_s`."""
ATTACHES_S = 16.0
ATTACHES = 1024.0
HAVES_AN_ATTACH = 64
"""The rate (per second) and burst of attachments of one session. `HAVES_AN_ATTACH` listed chunks cost as much as one
attachment. Each attachment makes us send headers again, and decode its list (0.1 ms per hundred chunks). A node that
loses all its parents during a version of 9 GB attaches in eight stripes with 4,500 chunks each, which costs 570."""
ROSTER_REQUESTS_S = 10.0
ROSTER_REQUESTS = 40.0
"""The rate (per second) and burst of roster requests of one session. A member sends one when a change is missing, at
most once in `pull_deadline_s`; an answer may be a quarter of a megabyte."""


@dataclass(slots=True)
class Session:
    """A control session with one peer. Times are local, in seconds, unless noted."""

    peer: bytes
    since: float
    heard_at: float
    address: str | None = None
    slot: int | None = None
    """The slot of its grant, after its hello; None before, and for the authority."""
    issued: float = 0.0
    """When its grant was issued (authority time)."""
    shard: Share | None = None
    """What of the model it holds, by its grant; None: all of it."""
    asked_at: float = float("-inf")
    """When it last asked to join."""
    roster: int = 0
    """The stamp of the newest roster that it named."""
    wanted_roster_at: float = float("-inf")
    """When we last requested the roster from it."""
    gave_roster_at: float = float("-inf")
    """When we last sent it the whole roster."""
    rtt_s: float = 0.0
    """The shortest round trip measured, in seconds; 0 before the first."""
    pinged_at: float = float("-inf")
    """When we last sent it a ping."""
    closing: bool = False
    """We have asked the runtime to close it."""
    parted: bool = False
    """One end has closed it because it has no use for it; the peer is not lost."""
    ready: bool = False
    """The peer has proven that it belongs to the swarm, so content may flow."""
    reports: Bucket = field(default_factory=lambda: Bucket(1.0, 1.0))
    """Reports that it may still have us verify; see `report_limits.may_verify`."""
    attaches: Bucket = field(default_factory=lambda: Bucket(ATTACHES_S, ATTACHES))
    """Attachments that it may still make; see `pay_for_attaching`."""
    roster_requests: Bucket = field(default_factory=lambda: Bucket(ROSTER_REQUESTS_S, ROSTER_REQUESTS))
    """Requests for the roster that it may still send."""


def pay_for_attaching(session: Session, haves: int, now: float) -> None:
    """Charge an attachment that lists `haves` chunks. Raises `PeerError` if a child attaches too often."""
    if not session.attaches.take(1 + haves / HAVES_AN_ATTACH, now):
        raise PeerError("attach: far more often, or with far more chunks, than any plan makes a child attach")


@dataclass(slots=True)
class _Attempt:
    """The dials to a peer."""

    failures: int = 0
    dialing: bool = False
    began_at: float = 0.0
    """When the last one began."""
    next_at: float = 0.0


class Sessions:
    """Sessions and dials.

    A failed dial is repeated after `dial_retry_s`, which doubles up to `BACK_OFF_TIMES` as much, with a jitter of 25 %,
    so that the members of a swarm that lost its trainer do not return at once. For the authority see `limit_back_off`.
    """

    def __init__(self, tuning: Tuning, rng: random.Random, outbox: Outbox) -> None:
        self._tuning = tuning
        self._outbox = outbox
        self._rng = rng
        self._open: dict[bytes, Session] = {}
        self._attempts: dict[bytes, _Attempt] = {}
        self._most_s: dict[bytes, float] = {}
        """By peer: the longest pause, if it is shorter than that for others."""

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def get(self, peer: bytes) -> Session | None:
        return self._open.get(peer)

    def ping(self, session: Session, now: float) -> None:
        """Send a ping, to measure the round trip."""
        session.pinged_at = now
        self._outbox.send(session.peer, Ping(0))

    def pong(self, session: Session, now: float) -> None:
        """The peer answered the ping. The shortest round trip counts, since longer ones include queueing."""
        took = now - session.pinged_at
        session.rtt_s = min(session.rtt_s, took) if session.rtt_s else took

    def rtt_s(self, peer: bytes) -> float:
        """The round trip to a peer in seconds; 0 while it is not known."""
        session = self._open.get(peer)
        return 0.0 if session is None else session.rtt_s

    def shard_of(self, peer: bytes) -> Share | None:
        """What of the model `peer` holds; None: all of it, or there is no session with it."""
        session = self._open.get(peer)
        return None if session is None else session.shard

    def ready(self, peer: bytes) -> bool:
        """Whether there is a session with `peer` over which content may flow."""
        session = self._open.get(peer)
        return session is not None and session.ready and not session.closing

    def up(self, peer: bytes, address: str | None, now: float) -> Session:
        """A session was opened; `address`: the peer's remote address."""
        attempt = self._attempts.get(peer)
        if attempt is not None:
            attempt.dialing = False
        session = self._open[peer] = Session(peer, now, now, address)
        return session

    def down(self, peer: bytes, dial_failed: bool, now: float) -> Session | None:
        """A session ended, or a dial failed; returns the session that ended, if any."""
        attempt = self._attempts.get(peer)
        session = None if dial_failed else self._open.pop(peer, None)
        if session is not None and session.ready:
            self._attempts.pop(peer, None)
        elif attempt is not None:
            attempt.dialing = False
            attempt.failures += 1
            retry_s, most_s = self._tuning.dial_retry_s, self._most_s.get(peer, math.inf)
            longest_s = max(retry_s / QUICK_SHARE, min(BACK_OFF_TIMES * retry_s, most_s))
            pause = min(longest_s, retry_s * 2.0 ** min(attempt.failures - 1, 10))
            since = attempt.began_at if peer in self._most_s else now
            attempt.next_at = max(now, since + pause * (1 + self._rng.uniform(-0.25, 0.25)))
        return session

    def reach(self, peer: bytes, addrs: tuple[str, ...], now: float) -> bool:
        """Whether a session is open; otherwise dial the peer as soon as the back-off allows."""
        if peer in self._open:
            return True
        attempt = self._attempts.setdefault(peer, _Attempt())
        if addrs and not attempt.dialing and now >= attempt.next_at:
            attempt.dialing, attempt.began_at = True, now
            self._outbox.emit(Dial(peer, addrs))
        return False

    def limit_back_off(self, peer: bytes, most_s: float) -> None:
        """Pause no longer than `most_s` between failed dials to `peer`, but for some part of `dial_retry_s`.

        The pause counts from when the failed dial began. So after one that nobody answered, the next may follow at
        once: only while one is on its way do we notice that the network is back.
        """
        self._most_s[peer] = most_s

    def retry(self, now: float, within_s: Mapping[bytes, float]) -> None:
        """Forget that dials failed: the network was cut, and is not any more. `within_s`: peers that are not dialed at
        once, but at a random moment of this time."""
        for peer, attempt in self._attempts.items():
            if attempt.failures:
                attempt.failures = 0
                attempt.next_at = min(attempt.next_at, now + self._rng.uniform(0.0, within_s.get(peer, 0.0)))

    def tries(self, peer: bytes) -> bool:
        """Whether `peer` has been dialed in vain, or is being dialed; a dial that is due is then made by `reach`."""
        return peer in self._attempts

    def dialing(self, peer: bytes) -> bool:
        """Whether `peer` is being dialed."""
        attempt = self._attempts.get(peer)
        return attempt is not None and attempt.dialing

    def failing(self, peer: bytes, now: float) -> bool:
        """Whether the last dial to it failed or its session never became ready, and the next is not due yet."""
        attempt = self._attempts.get(peer)
        if self.ready(peer):
            return False
        return attempt is not None and attempt.failures > 0 and now < attempt.next_at

    def keep(self, peers: Container[bytes]) -> None:
        """Forget the dials of all peers but these."""
        self._attempts = {p: a for p, a in self._attempts.items() if a.dialing or p in peers}

    def close_unproven(self, now: float) -> None:
        """Close sessions whose peers did not prove in time that they belong to the swarm."""
        for session in self:
            if not (session.ready or session.closing) and now - session.since > self._tuning.hello_deadline_s:
                session.closing = True
                self._outbox.emit(Close(session.peer, "sent no proof that it belongs to the swarm"))
