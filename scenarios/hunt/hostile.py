"""A hostile node: it runs the product's code, and for a while sends something else than that code decides.

What it signs, it signs with its own key, and it is a member with a lease: the hardest attacker that has no key but its
own. Where such a node is, the invariants hold for all others.
"""

import random
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any, Final

from msgspec.structs import replace

from codec.sign import Key
from node.ledger.messages import Rollout, SignedRollout, decode, encode, open_rollout, seal_rollout
from swarm.protocol.core.documents import open_report, seal
from swarm.protocol.core.events import Effect, Send, SendBlob, SendBlock, SendHeader, SendPiece
from swarm.protocol.core.wire import HeartbeatNews, ManifestNews, Message, Reports, RosterNews, RosterStep, Work

__all__ = ["CONTENT", "Hostility"]

CONTENT: Final = (SendHeader, SendPiece, SendBlob, SendBlock)
"""Effects that send parts of a version or of the model."""
_NEWS: Final = (HeartbeatNews, RosterNews, RosterStep, ManifestNews, Reports)
"""What a member passes on to its neighbours."""
_REMEMBERED: Final = 64


@dataclass
class Hostility:
    """What one machine does instead of what its core decides; by default nothing."""

    withholds: bool = False
    """It sends no content."""
    poisons: float = 0.0
    """Probability that a piece that it sends is wrong (see `virtual_os`)."""
    eclipses: bool = False
    """It passes nothing on to other members: no content, heartbeat, roster, seal or report. It greets them and answers
    their pings, so they take it for a parent."""
    replays: float = 0.0
    """Probability that one of its earlier messages follows a message to the same peer."""
    falsifies: bool = False
    """Its reports tell something else to each peer: other versions, lost parents that are there, a model that it lacks.
    """
    forges: float = 0.0
    """Probability that a rollout that it sends is one that it has no right to."""
    _sent: deque[Send] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def end(self) -> None:
        """From now on it does what its core decides."""
        for each in fields(self):
            if not each.name.startswith("_"):
                setattr(self, each.name, each.default)

    def forget(self) -> None:
        """Another process begins: what the one before it sent is not sent again, for its answers would be nobody's."""
        self._sent.clear()

    def instead_of(self, effect: Effect, key: Key, swarm: bytes, rng: random.Random) -> list[Effect]:
        """What is performed instead of an effect. `key`: the node's; `swarm`: the authority's."""
        if isinstance(effect, CONTENT):
            return [] if self.withholds or (self.eclipses and effect.peer != swarm) else [effect]
        if not isinstance(effect, Send):
            return [effect]
        if self.eclipses and effect.peer != swarm and isinstance(effect.message, _NEWS):
            return []
        sent: list[Effect] = [Send(effect.peer, self._changed(effect.message, key, swarm, rng))]
        if rng.random() < self.replays:
            sent += [earlier for earlier in self._sent if earlier.peer == effect.peer][:1]
        self._sent.append(effect)
        return sent

    def _changed(self, message: Message, key: Key, swarm: bytes, rng: random.Random) -> Message:
        if self.falsifies and isinstance(message, Reports):
            return replace(message, reports=tuple(_falsified(sealed, key, swarm, rng) for sealed in message.reports))
        if isinstance(message, Work) and rng.random() < self.forges:
            said = decode(message.body)
            if isinstance(said, SignedRollout):
                forged = _forged(open_rollout(key.public, said.sealed), rng)
                return Work(encode(SignedRollout(seal_rollout(key, forged))))
        return message


def _falsified(sealed: bytes, key: Key, swarm: bytes, rng: random.Random) -> bytes:
    """Another report of the same member in the place of one of our own; those of others are passed on as they are."""
    report = open_report(sealed, swarm)
    if report.peer != key.public:
        return sealed
    claims: tuple[dict[str, Any], ...] = (
        {"version": report.version + rng.randint(1, 3)},
        {"version": max(0, report.version - 1)},
        {"epoch": report.epoch + 1},
        {"lost": tuple(range(rng.randint(1, 4)))},
        {"catching_up": rng.random()},
        {"engine": "hunt", "engine_version": report.version + 1, "tokens_s": 1e6},
        {"saving": not report.saving},
        {"counter": report.counter + rng.randint(1, 2)},
        {"gave": ((0, 1 << 40),)},
    )
    return seal(replace(report, **rng.choice(claims)), key)


def _forged(rollout: Rollout, rng: random.Random) -> Rollout:
    """Another rollout of the same node: of another lease, of another sample, or drawn from another version."""
    first, *others = rollout.spans
    claims: tuple[dict[str, Any], ...] = (
        {"lease": max(0, rollout.lease + rng.choice((-1, 1)))},
        {"sample": rollout.sample ^ 1},
        {"token": max(0, rollout.token + rng.choice((-1, 1)))},
        {"spans": (replace(first, root=rng.randbytes(32)), *others)},
        {"spans": (replace(first, version=first.version + 1), *others)},
        {"spans": (replace(first, version=max(0, first.version - 3)), *others)},
    )
    return replace(rollout, **rng.choice(claims))
