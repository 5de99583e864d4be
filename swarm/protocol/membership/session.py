"""Who we are connected to, and whom we try to reach: sessions with their standing, dials with their back-off."""

import random
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from codec.errors import PeerError
from swarm.protocol.core.bucket import Bucket
from swarm.protocol.core.events import Close, Dial
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Ping

__all__ = ["BAN_S", "Session", "Sessions", "pay_for_attaching"]

BAN_S = 600.0
"""How long a peer that sent false bytes is refused by whoever saw it."""
ATTACHES_S = 16.0
ATTACHES = 1024.0
HAVES_AN_ATTACH = 64
"""How often one session may attach a second, and at once; and so many chunks that an attachment lists cost as much as
one without. Each has headers sent again, and its list decoded and walked (0.1 ms a hundred). A node that loses all of
its parents amid a version of 9 GB attaches to eight stripes and lists 4,500 chunks each time: 570."""
QUESTIONS_S = 10.0
QUESTIONS = 40.0
"""Questions about the roster that one session may ask a second, and at once. A member asks when it finds a gap, at most
once in `pull_deadline_s`; each answer may be a quarter of a megabyte."""


@dataclass(slots=True)
class Session:
    """A control session with one peer."""

    peer: bytes
    since: float
    heard_at: float
    address: str | None = None
    slot: int | None = None
    """The slot that its grant names, once it has said hello; None before, and for the authority."""
    issued: float = 0.0
    """When that grant was given (authority time)."""
    asked_at: float = float("-inf")
    """Local time at which it last asked to join."""
    roster: int = 0
    """Stamp of the newest roster that it named."""
    wanted_roster_at: float = float("-inf")
    """When we last asked it for the roster."""
    gave_roster_at: float = float("-inf")
    """When we last gave it the whole one."""
    rtt_s: float = 0.0
    """Shortest round trip measured; 0: none yet."""
    pinged_at: float = float("-inf")
    """When we last asked how far it is."""
    closing: bool = False
    """We have asked for its end."""
    ready: bool = False
    """It has proven that it belongs: content may flow."""
    reports: Bucket = field(default_factory=lambda: Bucket(1.0, 1.0))
    """How many reports it may still have us verify; see `renewals.may_verify`."""
    attaches: Bucket = field(default_factory=lambda: Bucket(ATTACHES_S, ATTACHES))
    """How often it may still attach; see `pay_for_attaching`."""
    questions: Bucket = field(default_factory=lambda: Bucket(QUESTIONS_S, QUESTIONS))
    """How many questions about the roster it may still ask."""


def pay_for_attaching(session: Session, haves: int, now: float) -> None:
    """A child attaches, and lists so many chunks. `PeerError` when it does so again and again."""
    if not session.attaches.take(1 + haves / HAVES_AN_ATTACH, now):
        raise PeerError("attach: far more often, or with far more chunks, than any plan has a child attach")


@dataclass(slots=True)
class _Attempt:
    """A peer that we want to reach."""

    failures: int = 0
    dialing: bool = False
    next_at: float = 0.0


class Sessions:
    """Sessions and dials. A failed dial is tried again after `dial_retry_s`, doubling up to 16 times that, with jitter
    (a quarter), so that a swarm that lost its trainer does not return as one."""

    def __init__(self, tuning: Tuning, rng: random.Random, outbox: Outbox) -> None:
        self._tuning = tuning
        self._outbox = outbox
        self._rng = rng
        self._open: dict[bytes, Session] = {}
        self._attempts: dict[bytes, _Attempt] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def get(self, peer: bytes) -> Session | None:
        return self._open.get(peer)

    def ping(self, session: Session, now: float) -> None:
        """Ask how far it is."""
        session.pinged_at = now
        self._outbox.send(session.peer, Ping(0))

    def pong(self, session: Session, now: float) -> None:
        """It answered; the shortest time counts, for the others were spent in queues."""
        took = now - session.pinged_at
        session.rtt_s = min(session.rtt_s, took) if session.rtt_s else took

    def rtt_s(self, peer: bytes) -> float:
        """The round trip to a peer; 0 while it is not known."""
        session = self._open.get(peer)
        return 0.0 if session is None else session.rtt_s

    def ready(self, peer: bytes) -> bool:
        session = self._open.get(peer)
        return session is not None and session.ready and not session.closing

    def up(self, peer: bytes, address: str | None, now: float) -> Session:
        attempt = self._attempts.get(peer)
        if attempt is not None:
            attempt.dialing = False
        session = self._open[peer] = Session(peer, now, now, address)
        return session

    def down(self, peer: bytes, dial_failed: bool, now: float) -> Session | None:
        """Forget the session, or note that a dial failed. The session that was, if any."""
        attempt = self._attempts.get(peer)
        session = None if dial_failed else self._open.pop(peer, None)
        if session is not None and session.ready:
            self._attempts.pop(peer, None)
        elif attempt is not None:
            attempt.dialing = False
            attempt.failures += 1
            pause = self._tuning.dial_retry_s * min(16, 1 << min(attempt.failures - 1, 10))
            attempt.next_at = now + pause * (1 + self._rng.uniform(-0.25, 0.25))
        return session

    def reach(self, peer: bytes, addrs: tuple[str, ...], now: float) -> bool:
        """True when a session is open; otherwise dial it as soon as the back-off allows."""
        if peer in self._open:
            return True
        attempt = self._attempts.setdefault(peer, _Attempt())
        if addrs and not attempt.dialing and now >= attempt.next_at:
            attempt.dialing = True
            self._outbox.emit(Dial(peer, addrs))
        return False

    def failing(self, peer: bytes, now: float) -> bool:
        """The last dial to it failed or led to nothing, and it is not yet time for another."""
        attempt = self._attempts.get(peer)
        if self.ready(peer):
            return False
        return attempt is not None and attempt.failures > 0 and now < attempt.next_at

    def keep(self, peers: Container[bytes]) -> None:
        """Nobody but these will be dialed again: forget how it went with the others."""
        self._attempts = {p: a for p, a in self._attempts.items() if a.dialing or p in peers}

    def expire_mute(self, now: float) -> None:
        """Close sessions that never said who they are."""
        for session in self:
            if not (session.ready or session.closing) and now - session.since > self._tuning.hello_deadline_s:
                session.closing = True
                self._outbox.emit(Close(session.peer, "said nothing that proves it belongs here"))
