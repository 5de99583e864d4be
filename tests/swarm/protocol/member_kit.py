"""A member among made-up neighbours, and queries on its effects."""

from protocol_kit import SWARM, admit, key_of, meet, new_peer, only, report, sends

from swarm.protocol.core.documents import open_report, seal
from swarm.protocol.core.events import Dial, Effect, Timer
from swarm.protocol.core.wire import Reports
from swarm.protocol.member import Peer

CHAIN = ((1, 2, -1),)
"""One stripe: the parent of slot 0 (us) is 1, of 1 is 2, of 2 is the authority."""


def a_member(parents=CHAIN, **more) -> Peer:
    peer = new_peer(0)
    admit(peer, parents, **more)
    return peer


def tick(peer: Peer, now: float) -> list[Effect]:
    return peer.apply(Timer("tick"), now)


def parents(peer: Peer) -> dict[int, bytes]:
    return {stripe: edge.peer for stripe, edge in peer.state.exchange.parents.edges.items()}


def dialed(effects: list[Effect]) -> set[bytes]:
    return {e.peer for e in only(effects, Dial)}


def reports_in(effects: list[Effect]) -> list:
    return [open_report(sealed, SWARM) for message in sends(effects, Reports) for sealed in message.reports]


def a_report(slot: int = 2, counter: int = 1, **more) -> bytes:
    key = more.pop("key", key_of(slot))
    return seal(report(slot, bytes(32), counter, key=key, **more), key)


def a_forwarder() -> Peer:
    peer = a_member()
    meet(peer, 1)
    meet(peer, 2)
    tick(peer, 0.5)
    return peer
