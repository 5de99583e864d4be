"""The kinds of messages and documents that peers send: every tag of `swarm.protocol.core.wire` and its documents.

`Kind.make` gets a `Scene`. A document is mutated, signed with a key that the kind chooses, and put into its message.
"""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final, get_args

import msgspec

from codec import manifest as manifests
from scenarios.fuzz.inputs.binary import fields_of_values, write
from scenarios.fuzz.inputs.fields import Field, Kind, fields_of, plain
from scenarios.fuzz.inputs.scene import Scene, key_of
from scenarios.fuzz.inputs.values import Mutation
from swarm.protocol.core import documents, wire
from swarm.protocol.core.documents import Capability, Grant, Heartbeat, Report
from swarm.protocol.membership import roster, succession
from swarm.protocol.membership.succession import Successor, seal_successor

__all__ = ["MESSAGES", "document_kinds", "manifest_values", "message_kinds", "pack", "sealed_as"]

MESSAGES: Final[tuple[type[wire.Message], ...]] = get_args(wire._ALL)

_ADDRS: Final = ("/ip4/198.51.100.7/tcp/4001",)
_HAVE: Final = wire.Have(0, 3, 0, 0, b"\1")


def _successor(scene: Scene) -> Successor:
    return Successor(scene.swarm, key_of("successor").public, _ADDRS, scene.seal_of(scene.capability()), "wan")


BUILD: Final[dict[type, Callable[[Scene], wire.Message]]] = {
    wire.Join: lambda s: wire.Join(
        s.seal_of(s.capability()), _ADDRS, "n", "eu", 100.0, 100.0, False, 4, (1,), "fp8-block"
    ),
    wire.Welcome: lambda s: wire.Welcome(
        s.seal_of(s.grant()), s.sealed_roster(), s.sealed_heartbeat(), s.sealed_manifest(),
        (wire.Neighbour(s.me.public, _ADDRS),),
    ),
    wire.Refused: lambda s: wire.Refused("ticket", "no"),
    wire.Hello: lambda s: wire.Hello(s.seal_of(s.grant()), 1, 1, 0, s.version),
    wire.RosterNews: lambda s: wire.RosterNews(s.sealed_roster()),
    wire.HeartbeatNews: lambda s: wire.HeartbeatNews(s.sealed_heartbeat()),
    wire.ManifestNews: lambda s: wire.ManifestNews(s.sealed_manifest()),
    wire.Reports: lambda s: wire.Reports(s.stripe, (s.seal_of(s.report()),)),
    wire.Attach: lambda s: wire.Attach(s.stripe, 0, s.version, 1 << 20, (_HAVE,)),
    wire.Detach: lambda s: wire.Detach(s.stripe),
    wire.Credit: lambda s: wire.Credit(s.stripe, 1 << 20, 100),
    wire.WantChunk: lambda s: wire.WantChunk(0, s.version, 0, 0, b"\1"),
    wire.LacksChunk: lambda s: wire.LacksChunk(0, s.version, 0, 0),
    wire.WantBlob: lambda s: wire.WantBlob(1, wire.Blob.LAYOUT, bytes(32), 0),
    wire.WantBlock: lambda s: wire.WantBlock(1, 0),
    wire.Lacks: lambda s: wire.Lacks(1),
    wire.WantManifest: lambda s: wire.WantManifest(0, s.version),
    wire.Work: lambda s: wire.Work(b"\1\x90"),
    wire.Bye: lambda s: wire.Bye(s.seal_of(s.report(leaving=True))),
    wire.RosterStep: lambda s: wire.RosterStep(s.sealed_change()),
    wire.WantRoster: lambda s: wire.WantRoster(1),
    wire.Ping: lambda s: wire.Ping(7),
    wire.Pong: lambda s: wire.Pong(7),
    wire.Skip: lambda s: wire.Skip(s.stripe, 0, s.version, 0, 0),
    wire.LateChunkWants: lambda s: wire.LateChunkWants(0, s.version + 1, 0, (0, 1)),
    wire.Offer: lambda s: wire.Offer(0, s.version + 1, 0, 0),
    wire.Succession: lambda s: wire.Succession(seal_successor(_successor(s), s.authority)),
}  # fmt: skip


def pack(message: msgspec.Struct) -> bytes:
    """Encode a message as on the wire, without the size limit."""
    return bytes((wire.PROTOCOL,)) + msgspec.msgpack.encode(message)


def _outer(cls: type[wire.Message]) -> Kind:
    build = BUILD[cls]
    return Kind(
        cls.__name__,
        fields_of(cls, plain(build(Scene()))),
        lambda scene: plain(build(scene)),
        lambda scene, body: bytes((wire.PROTOCOL,)) + body,
    )


def message_kinds() -> list[Kind]:
    """Return a kind for every tag. Raises `KeyError` when `BUILD` lacks a message of `wire`."""
    return [_outer(cls) for cls in MESSAGES]


def body_of(scene: Scene, document: Capability | Grant | Heartbeat | Report) -> Any:
    """Return the signed body of a document as a plain value."""
    return msgspec.msgpack.decode(scene.seal_of(document)[64:])


def sealed_as(cls: type, scene: Scene, body: bytes) -> bytes:
    """Sign a body under the domain of this document: reports by the speaker, all others by the authority."""
    key = scene.me if cls is Report else scene.authority
    return key.seal(documents._DOMAINS[cls], body)


def _document(
    name: str,
    cls: type,
    make: Callable[[Scene], Any],
    carry: Callable[[Scene, bytes], wire.Message],
    more: tuple[Field, ...] = (),
) -> Kind:
    """Return the kind of a document of `documents` inside the message that `carry` makes of it."""
    return Kind(
        name,
        fields_of(cls, body_of(Scene(), make(Scene()))) + more,
        lambda scene: body_of(scene, make(scene)),
        lambda scene, body: pack(carry(scene, sealed_as(cls, scene, body))),
        by_authority=cls is not Report,
    )


_BOMB: Final = zlib.compress(bytes(64 << 20), 9, wbits=-15)
_BOMBS: Final = tuple(
    Field(
        f"Heartbeat.{name}",
        (place,),
        (
            Mutation("bits that unpack to 64 MiB", lambda old, rng: _BOMB),
            Mutation("no bits", lambda old, rng: documents._packed(b"")),
            Mutation("all slots", lambda old, rng: documents._packed(b"\xff" * 2048)),
            Mutation("a slot too many", lambda old, rng: documents._packed(b"\xff" * 2049)),
        ),
    )
    for place, name in ((7, "live"), (8, "fresh"))
)


MADE_UP: Final = 4095


@cache
def _made_up(signed: bytes) -> tuple[bytes, ...]:
    """Return valid reports of unknown peers, each with its own key. `signed`: a sample signature of this run, which
    keys the cache."""
    scenes = [Scene(me=key_of(f"made up {i}"), slot=i, count=lambda: 1 << 40) for i in range(MADE_UP)]
    return tuple(scene.seal_of(scene.report()) for scene in scenes)


def _flood_kind() -> Kind:
    """Return the kind of a message full of reports by made-up keys, each of which costs a signature check."""

    def flood(scene: Scene, body: bytes) -> bytes:
        reports = _made_up(scene.me.seal(b"", b""))
        return pack(wire.Reports(scene.stripe, (*reports, sealed_as(Report, scene, body))))

    return Kind("Reports/flood", (), lambda scene: body_of(scene, scene.report()), flood)


def _change_kind() -> Kind:
    return Kind(
        "RosterStep/Change",
        fields_of(roster.Change, plain(Scene().change())),
        lambda scene: plain(scene.change()),
        lambda scene, body: pack(wire.RosterStep(scene.authority.seal(roster._DOMAIN, body))),
        by_authority=True,
    )


def _succession_kind() -> Kind:
    return Kind(
        "Succession/Successor",
        fields_of(Successor, plain(_successor(Scene()))),
        lambda scene: plain(_successor(scene)),
        lambda scene, body: pack(wire.Succession(scene.authority.seal(succession._DOMAIN, body))),
        by_authority=True,
    )


def _roster_kind() -> Kind:
    """Return the kind of a whole roster of mutated bytes, with a change that names their hash."""
    return Kind(
        "RosterNews/Roster",
        fields_of(roster.Roster, plain(Scene().plan())),
        lambda scene: plain(scene.plan()),
        lambda scene, body: pack(wire.RosterNews(scene.whole(body or b"\xc0"))),
        by_authority=True,
    )


def _whole_kind() -> Kind:
    """Return the kind in which the pair of change and body is itself mutated."""
    return Kind(
        "RosterNews/pair",
        fields_of(roster._Whole, msgspec.msgpack.decode(Scene().sealed_roster()), "pair"),
        lambda scene: msgspec.msgpack.decode(scene.sealed_roster()),
        lambda scene, body: pack(wire.RosterNews(body)),
    )


MANIFEST_NAMES: Final = ["magic", "swarm", "epoch", "version", "attempt", "parent", "root", "layout", "payload",
                         "changed", "chunks", "first", "second"]  # fmt: skip


def manifest_values(scene: Scene) -> list[Any]:
    """Return the values of a manifest in the order of its encoding."""
    m = scene.manifest()
    return [manifests._MAGIC, m.swarm, m.epoch, m.version, m.attempt, m.parent_root, m.root, m.layout_hash,
            m.payload_bytes, m.changed, len(m.chunk_ids), *m.chunk_ids]  # fmt: skip


def _manifest_kind() -> Kind:
    return Kind(
        "ManifestNews/Manifest",
        fields_of_values("Manifest", manifest_values(Scene()), MANIFEST_NAMES),
        manifest_values,
        lambda scene, body: pack(wire.ManifestNews(scene.authority.seal(manifests._DOMAIN, body))),
        write,
        by_authority=True,
    )


def _welcome(scene: Scene, **changed: bytes) -> wire.Message:
    return msgspec.structs.replace(BUILD[wire.Welcome](scene), **changed)


def document_kinds() -> list[Kind]:
    """Return a kind for every document in each message that carries it."""
    return [
        _document("Reports/Report", Report, lambda s: s.report(), lambda s, d: wire.Reports(s.stripe, (d,))),
        _document("Reports/many", Report, lambda s: s.report(), lambda s, d: wire.Reports(s.stripe, (d,) * 64)),
        _flood_kind(),
        _document("Bye/Report", Report, lambda s: s.report(leaving=True), lambda s, d: wire.Bye(d)),
        _document("Hello/Grant", Grant, lambda s: s.grant(), lambda s, d: wire.Hello(d, 1, 1, 0, s.version)),
        _document(
            "Hello/Grant of a shard",
            Grant,
            lambda s: msgspec.structs.replace(s.grant(), shards=4, ranks=(1,)),
            lambda s, d: wire.Hello(d, 1, 1, 0, s.version),
        ),
        _document(
            "Hello/Grant of a format",
            Grant,
            lambda s: msgspec.structs.replace(s.grant(), form="fp8-block"),
            lambda s, d: wire.Hello(d, 1, 1, 0, s.version),
        ),
        _document("Welcome/Grant", Grant, lambda s: s.grant(), lambda s, d: _welcome(s, grant=d)),
        _document(
            "Join/Capability",
            Capability,
            lambda s: s.capability(),
            lambda s, d: wire.Join(d, _ADDRS, "n", "eu", 100.0, 100.0, False),
        ),
        _document(
            "HeartbeatNews/Heartbeat", Heartbeat, lambda s: s.heartbeat(), lambda s, d: wire.HeartbeatNews(d), _BOMBS
        ),
        _document("Welcome/Heartbeat", Heartbeat, lambda s: s.heartbeat(), lambda s, d: _welcome(s, heartbeat=d)),
        _change_kind(),
        _succession_kind(),
        _roster_kind(),
        _whole_kind(),
        _manifest_kind(),
    ]
