"""An authority, and peers that connect to it."""

import random

from protocol_kit import (
    AUTHORITY,
    TUNING,
    capability,
    join_message,
    key_of,
    manifest,
    only,
    report,
    say,
)  # fmt: skip

from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import AuthorityTime, heartbeat_hash, seal
from swarm.protocol.core.events import (  # fmt: skip
    Effect,
    Notify,
    PeerDown,
    PeerUp,
    Persist,
    Persisted,
    Probe,
    Probed,
    Timer,
)
from swarm.protocol.core.wire import Hello, Join  # fmt: skip
from swarm.protocol.startup import Boot, Saved, Site

TICKET = seal(capability(nodes=100), AUTHORITY)


def clock(now: float) -> AuthorityTime:
    return AuthorityTime(1000.0 + now)


def an_authority(
    *, boot: int = 1, grants: list[bytes] | None = None, up_mbit: float = 0.0, now: float = 0.0, shards: int = 0
) -> Authority:
    core = Authority(
        AUTHORITY, TUNING, random.Random(1), Boot(boot, clock), Saved(manifest(0, 0), grants or []),
        Site(("/sim/authority",), up_mbit=up_mbit, shards=shards), now=now,
    )  # fmt: skip
    core.start(now)
    return core


def connect_peer(core: Authority, slot: int | bytes, now: float = 0.0) -> None:
    core.apply(PeerUp(slot if isinstance(slot, bytes) else key_of(slot).public, False, "/ip4/9.9.9.9/tcp/1"), now)


def make_durable(core: Authority, effects: list[Effect], now: float) -> list[Effect]:
    return [e for wish in only(effects, Persist) for e in core.apply(Persisted(wish.token), now)]


def join(core: Authority, slot: int, now: float = 1.0, message: Join | None = None) -> list[Effect]:
    """A peer connects and asks to join; its grant becomes durable, and the next tick admits it."""
    connect_peer(core, slot, now)
    effects = say(core, slot, message or join_message(TICKET), now)
    effects += make_durable(core, effects, now)
    effects += [e for wish in only(effects, Probe) for e in core.apply(Probed(wish.peer, wish.addrs), now)]
    return effects + core.apply(Timer("tick"), now + TUNING.tick_s + 0.01)


def members(core: Authority, count: int) -> Authority:
    for slot in range(count):
        join(core, slot, 1.0 + slot)
    return core


def notices_of(effects: list[Effect], what: str) -> list[dict]:
    return [e.notice.log_fields() for e in only(effects, Notify) if e.notice.log_name == what]


def renewal(core: Authority, slot: int, counter: int, **more) -> bytes:
    key = more.pop("key", key_of(slot))
    serial = more.pop("serial", core.book.leases[slot].grant.serial if slot in core.book.leases else 1)
    beaten = heartbeat_hash(core.state.leases.sealed)
    return seal(report(slot, beaten, counter, key=key, serial=serial, **more), key)


def reconnect(core: Authority, slot: int, shown: bytes, now: float = 5.0) -> list[Effect]:
    core.apply(PeerDown(key_of(slot).public), now)
    connect_peer(core, slot, now)
    return say(core, slot, Hello(shown, 0, 0, 0, 0), now)
