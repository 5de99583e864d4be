"""Keys, signed documents and single cores, for tests that drive the machines by hand."""

import random
from collections.abc import Iterable
from typing import Any, TypeVar

from blake3 import blake3

from codec import ChunkKey, Manifest
from codec.shards import Shard
from codec.sign import Key
from swarm.protocol.core.documents import Capability, Grant, Heartbeat, Report, bit_set, seal
from swarm.protocol.core.events import Effect, HeaderStored, Heard, PeerUp, Send, VersionId
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Hello, Join, Message, Welcome
from swarm.protocol.member import Peer
from swarm.protocol.membership.roster import Change, Member, Roster, seal_change, whole
from swarm.protocol.startup import SavedReplica
from swarm.protocol.transfer.chunks import Chunk, Chunks

TUNING = Tuning.loopback()
LAYOUT = bytes(32)
KIND = TypeVar("KIND")


def key_of(name: str | int) -> Key:
    return Key(blake3(str(name).encode()).digest())


AUTHORITY = key_of("authority")
SWARM = AUTHORITY.public


def root_of(id_: VersionId) -> bytes:
    return blake3(f"root {id_}".encode()).digest()


def version(number: int, epoch: int = 0) -> VersionId:
    return VersionId(epoch, number)


def chunk_id(key: ChunkKey) -> bytes:
    return blake3(repr(tuple(key)).encode()).digest()


def header(
    number: int,
    seq: int,
    *,
    attempt: int = 0,
    pieces: int = 4,
    piece_bytes: int = 1000,
    stripe: int | None = 0,
    peer: bytes | None = None,
    epoch: int = 0,
    wanted: bool = True,
) -> HeaderStored:
    """The event of a stored header of version `number`."""
    key = ChunkKey(epoch, number, attempt, seq)
    parent = root_of(VersionId(epoch, number - 1))
    return HeaderStored(peer, stripe, key, chunk_id(key), parent, (piece_bytes,) * pieces, 100, wanted=wanted)


def manifest(
    number: int, chunks: int, *, attempt: int = 0, epoch: int = 0, root: bytes | None = None, key: Key = AUTHORITY
) -> bytes:
    """The seal of version `number`, of chunks as `header` makes them."""
    id_ = VersionId(epoch, number)
    ids = tuple(chunk_id(ChunkKey(epoch, number, attempt, seq)) for seq in range(chunks))
    parent = root_of(VersionId(epoch, number - 1)) if number else bytes(32)
    return Manifest(SWARM, epoch, number, attempt, parent, root or root_of(id_), LAYOUT, ids, 1, 1).seal(key)


def book_with(chunks: Iterable[HeaderStored], *, held: bool = True) -> tuple[Chunks, list[Chunk]]:
    """`Chunks` with these chunks; `held`: with every piece."""
    book, made = Chunks(Outbox()), []
    for event in chunks:
        taken = book.header(event, 0.0)
        assert taken is not None
        made.append(taken[0])
        for index in range(len(event.piece_bytes) if held else 0):
            book.piece(event.key, index, 0.0)
    return book, made


# ---------------------------------------------------------------- the authority's documents


def grant(
    slot: int,
    peer: bytes,
    *,
    serial: int = 1,
    issued: float = 1000.0,
    key: Key = AUTHORITY,
    shard: Shard | None = None,
) -> bytes:
    held = () if shard is None else (shard.shards, shard.ranks)
    return seal(Grant(SWARM, peer, slot, serial, issued, bytes(16), *held), key)


def heartbeat(
    serial: int,
    *,
    live: Iterable[int] = range(16),
    fresh: Iterable[int] | None = None,
    time: float | None = None,
    boot: int = 1,
    roster: int = 1,
    head: VersionId = VersionId(0, 0),  # noqa: B008 - a tuple cannot be changed
    key: Key = AUTHORITY,
) -> bytes:
    live = list(live)
    bits, fresh_bits = bit_set(live), bit_set(live if fresh is None else list(fresh))
    at = 1001.0 + serial if time is None else time
    return seal(Heartbeat(SWARM, boot, serial, at, roster, *head, bits, fresh_bits), key)


def member(
    slot: int,
    *,
    up_mbit: float = 100.0,
    leaf: bool = False,
    dialable: bool = True,
    peer: bytes = b"",
    region: str = "",
) -> Member:
    addrs = (f"/sim/{slot}",) if dialable else ()
    return Member(slot, peer or key_of(slot).public, addrs, dialable, f"node{slot}", region, up_mbit, leaf)


def roster(
    parents: Iterable[tuple[int, ...]],
    members: Iterable[Member],
    *,
    serial: int = 1,
    boot: int = 1,
    key: Key = AUTHORITY,
) -> bytes:
    made = Roster(SWARM, boot, serial, ("/sim/authority",), tuple(members), tuple(parents))
    change = Change(SWARM, boot, serial, 0, made.authority, (), (), ((),) * made.stripes, made.digest)
    return whole(made, seal_change(change, key))


def report(
    slot: int,
    heartbeat_hash: bytes,
    counter: int,
    *,
    key: Key | None = None,
    peer: bytes | None = None,
    serial: int = 1,
    leaving: bool = False,
    catching_up: float = 1.0,
    lost: tuple[int, ...] = (),
) -> Report:
    owner = key or key_of(slot)
    return Report(
        SWARM, peer or owner.public, slot, serial, counter, heartbeat_hash, 0, 0, 0, 0, "", 0, 0, 0.0, leaving,
        catching_up, lost,
    )  # fmt: skip


def capability(*, nodes: int = 4, expires: float = 1e9, name: int = 0, swarm: bytes = SWARM) -> Capability:
    return Capability(swarm, name.to_bytes(16, "little"), expires, nodes, 0)


# ---------------------------------------------------------------- a peer among made-up neighbours


def join_message(
    sealed_capability: bytes = b"", *, up_mbit: float = 100.0, relay: bool = False, shard: Shard | None = None
) -> Join:
    held = () if shard is None else (shard.shards, shard.ranks)
    return Join(sealed_capability, ("/sim/me",), "me", "", up_mbit, 1000.0, relay, *held)


def new_peer(
    slot: int = 0,
    *,
    held: int | None = 0,
    relay: bool = False,
    tuning: Tuning = TUNING,
    shard: Shard | None = None,
) -> Peer:
    """A peer that has not joined yet. `held`: the version that its replica is."""
    sealed = manifest(held, 0) if held is not None else None
    layout = LAYOUT if held is not None else None
    peer = Peer(
        key_of(slot), SWARM, ("/sim/authority",), join_message(relay=relay, shard=shard), tuning, random.Random(7),
        SavedReplica(sealed, layout),
    )  # fmt: skip
    peer.start(0.0)
    return peer


def admit(
    peer: Peer,
    parents: Iterable[tuple[int, ...]] = ((-1, 0, 0),),
    *,
    members: list[Member] | None = None,
    slot: int = 0,
    head: bytes = b"",
    now: float = 0.0,
) -> list[Effect]:
    """Admit the peer as slot `slot` of this plan; its effects."""
    parents = tuple(parents)
    members = members if members is not None else [member(s) for s in range(len(parents[0]))]
    apply = peer.apply
    effects = apply(PeerUp(SWARM, True), now)
    welcome = Welcome(
        grant(slot, peer.state.key.public, shard=peer.state.shard),
        roster(parents, members),
        heartbeat(1),
        head or manifest(0, 0),
    )
    return effects + apply(Heard(SWARM, welcome), now)


def meet(
    peer: Peer, slot: int, now: float = 0.0, *, key: Key | None = None, held: int = 0, shard: Shard | None = None
) -> list[Effect]:
    """The holder of `slot` opens a session and says hello."""
    other = (key or key_of(slot)).public
    hello = Hello(grant(slot, other, shard=shard), 0, 0, 0, held)
    return peer.apply(PeerUp(other, False), now) + peer.apply(Heard(other, hello), now)


def say(peer: Any, slot: int | bytes, message: Message, now: float = 0.0) -> list[Effect]:
    """`peer` (or the authority) gets this message from the holder of a slot; its effects."""
    return peer.apply(Heard(slot if isinstance(slot, bytes) else key_of(slot).public, message), now)


def fresh(machine: Any) -> list[Effect]:
    """The pending effects of this machine, emptied: those of later calls appear in the same list."""
    machine._outbox.pending.clear()
    return machine._outbox.pending


def only(effects: Iterable[Effect], kind: type[KIND]) -> list[KIND]:
    return [e for e in effects if isinstance(e, kind)]


def sends(effects: Iterable[Effect], kind: type[KIND], to: int | bytes | None = None) -> list[KIND]:
    """The messages of this kind among the effects (sent to this peer)."""
    peer = key_of(to).public if isinstance(to, int) else to
    return [
        e.message
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, kind) and (peer is None or e.peer == peer)
    ]
