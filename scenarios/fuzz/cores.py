"""The base of the worlds of both cores: sessions, effects answered as the runtime does, and bounds on their number."""

import random
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from codec.errors import PeerError
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.scene import Scene
from scenarios.fuzz.tables import sizes_of
from scenarios.fuzz.target import Broken, World
from swarm.protocol.core import wire
from swarm.protocol.core.events import (
    Close,
    Dial,
    Effect,
    Event,
    Heard,
    PeerDown,
    PeerUp,
    Persist,
    Persisted,
    Probe,
    Probed,
    Send,
    SendBlob,
    SendBlock,
    SendDone,
    SendHeader,
    SendPiece,
    Timer,
)

__all__ = ["CoreWorld"]

MAX_EFFECTS: Final = 600
"""Allowed effects of one event in a swarm of about ten. A changed plan is sent to all members in eight stripes."""
MAX_SENT_BYTES: Final = 1 << 20
"""Allowed bytes of all messages that one message of a peer causes."""
STEP_S: Final = 0.02
"""Simulated time between two messages."""


class CoreWorld(World, Scene):
    """A world around one core. `core`: an `Authority` or a `Peer`. `honest`: peers that must not be harmed."""

    core: Any

    def __init__(self) -> None:
        Scene.__init__(self)
        self.now = 0.0
        self.honest: set[bytes] = set()
        self.up: set[bytes] = set()
        """Peers with a session."""
        self.refused: dict[bytes, str] = {}
        """By peer, the code of the last `Refused` that it received."""
        self._next_tick = 0.0
        self._queue: deque[Event] = deque()
        self.most_effects = 0
        self.most_bytes = 0
        self.why = ""

    # ------------------------------------------------------------ time and events

    def pass_time(self, rng: random.Random) -> None:
        """Advance the time by `STEP_S` and fire the tick that is due."""
        self.now += STEP_S
        if self.now >= self._next_tick:
            self._next_tick = self.now + self.core.state.tuning.tick_s
            self.apply(Timer("tick"))

    def apply(self, event: Event, sender: bytes = b"") -> list[Effect]:
        """Apply one event, answer its effects as the runtime does, and return the effects of the event itself."""
        first = self.core.apply(event, self.now)
        self._bound(first, sender)
        self._answer(first)
        rounds = 0
        while self._queue:
            rounds += 1
            if rounds > 20_000:
                raise Broken("an event causes further events without end")
            self._answer(self.core.apply(self._queue.popleft(), self.now))
        return first

    def _bound(self, effects: list[Effect], sender: bytes) -> None:
        self.most_effects = max(self.most_effects, len(effects))
        if len(effects) > MAX_EFFECTS:
            raise Broken(f"one event had {len(effects)} effects, the first a {type(effects[0]).__name__}")
        if sender:
            size = sum(len(msgspec.msgpack.encode(e.message)) for e in effects if isinstance(e, Send))
            self.most_bytes = max(self.most_bytes, size)
            if size > MAX_SENT_BYTES:
                raise Broken(f"one message of a peer was answered with {size} bytes")

    def _answer(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    wire.encode(message)  # raises when the message cannot be encoded or is too large
                    self.sent(peer, message)
                case Close(peer, why, _):
                    self.closed(peer, why)
                case Persist(token, _, _):
                    self._queue.append(Persisted(token))
                case Probe(peer, addrs):
                    self._queue.append(Probed(peer, addrs[: len(peer) and peer[0] % 3]))
                case Dial(peer, _):
                    self._queue.append(PeerDown(peer, dial_failed=True, why="nobody"))
                case SendHeader(peer, stripe, key, pull):
                    self._queue.append(SendDone(peer, stripe, key, -1, pull))
                case SendPiece(peer, stripe, key, index, pull):
                    self._queue.append(SendDone(peer, stripe, key, index, pull))
                case SendBlob(peer) | SendBlock(peer):
                    self.gave(peer)
                case _:
                    self.other(effect)

    def sent(self, peer: bytes, message: wire.Message) -> None:
        """Handle a message that the core sends to a peer."""
        if isinstance(message, wire.Refused):
            if peer in self.honest:
                raise Broken(f"an honest peer was refused: {message.why}")
            self.refused[peer] = message.code

    def closed(self, peer: bytes, why: str) -> None:
        """Handle a session that the core closes."""
        if peer in self.honest:
            raise Broken(f"the session of an honest peer was closed: {why}")
        self.why = why
        if peer in self.up:
            self.up.discard(peer)
            self._queue.append(PeerDown(peer))

    def gave(self, peer: bytes) -> None:
        """Handle a blob or block that goes to a peer."""

    def other(self, effect: Effect) -> None:
        """Handle any other effect."""

    def queue(self, event: Event) -> None:
        """Apply `event` after the effects that are being answered."""
        self._queue.append(event)

    # ------------------------------------------------------------ sessions

    def connect(self, peer: bytes, *, address: str = "/ip4/198.51.100.7/tcp/999") -> None:
        """Open a session with the peer unless there is one."""
        if peer not in self.up:
            self.up.add(peer)
            self.apply(PeerUp(peer, False, address))

    def drop(self, peer: bytes) -> None:
        """Break the peer's session."""
        if peer in self.up:
            self.up.discard(peer)
            self.apply(PeerDown(peer))

    def hear(self, peer: bytes, message: wire.Message) -> list[Effect]:
        """Deliver a message of the peer; without a session, do nothing."""
        return self.apply(Heard(peer, message), peer) if peer in self.up else []

    def give(self, kind: Kind, data: bytes) -> str:
        try:
            message = wire.decode(data)
        except PeerError as error:
            return f"not decoded: {error}"
        sender = self.me.public
        if sender not in self.up:
            return "no session"
        self.why = ""
        effects = self.hear(sender, message)
        if self.why:
            return f"closed: {self.why}"
        kinds = sorted({e.message.__class__.__name__ if isinstance(e, Send) else type(e).__name__ for e in effects})
        return "taken" if not kinds else " ".join(kinds)

    def sealed_heartbeat(self) -> bytes:
        return self.core.state.leases.sealed

    def sealed_roster(self) -> bytes:
        return self.core.state.rosters.whole() if self.core.state.roster is not None else b""

    def sealed_change(self) -> bytes:
        return self.core.state.rosters.proof

    def sealed_manifest(self) -> bytes:
        return self.core.state.sealed_manifest

    def sizes(self) -> dict[str, int]:
        found = sizes_of(self.core, "core")
        return found | {"effects of one event": self.most_effects, "KiB said to one": self.most_bytes >> 10}
