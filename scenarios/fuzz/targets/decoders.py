"""Every decoder of bytes from a peer. It may raise only `PeerError`, and must be fast."""

import random
from struct import Struct
from typing import Any, ClassVar, Final

import msgspec
import numpy as np

from codec import Layout, open_header
from codec import chunk as chunks
from codec import layout as layouts
from codec.adapter import CONFIG_BYTES, AdapterConfig
from codec.errors import PeerError
from codec.manifest import open_manifest
from codec.routes import RouteShape, decode_routes, encode_routes, read_header
from node.engines.images import check_images
from node.ledger import messages as work
from node.ledger.packing import unpack_floats, unpack_tokens
from scenarios.fuzz.inputs import council, messages, saved
from scenarios.fuzz.inputs.binary import fields_of_values, write
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.images import image_kinds
from scenarios.fuzz.inputs.messages import document_kinds, message_kinds
from scenarios.fuzz.inputs.scene import AUTHORITY, LAYOUT, Scene
from scenarios.fuzz.inputs.work import work_kinds
from scenarios.fuzz.target import FOREVER, Target, World
from swarm.protocol.core import wire
from swarm.protocol.core.documents import open_capability, open_grant, open_heartbeat, open_report
from swarm.protocol.membership.roster import advance, open_change, open_whole
from swarm.protocol.membership.succession import open_successor

__all__ = ["Decoders", "open_all"]

_SHAPE: Final = RouteShape(2, 2, 8)
_IDS: Final = np.array([[[0, 3], [1, 7]], [[0, 3], [2, 7]], [[0, 5], [1, 7]]])
_CODE: Final = encode_routes(_IDS, _SHAPE.experts)[8:]
_HEAD: Final = Struct("<BBIQIIIQQI")
_WIDTHS: Final = (8, 8, 32, 64, 32, 32, 32, 64, 64, 32)
_HEAD_NAMES: Final = ["kind", "stripe", "epoch", "version", "attempt", "seq", "number", "offset", "total", "length"]


def _head(values: list[Any]) -> bytes:
    """Encode the head of a bulk frame; each number is cut to the width of its field."""
    numbers = [value if isinstance(value, int) else 0 for value in values]
    if len(numbers) != len(_WIDTHS):
        return bytes(7)
    return _HEAD.pack(*(n & ((1 << width) - 1) for n, width in zip(numbers, _WIDTHS, strict=True)))


def head_kind() -> Kind:
    """Return the kind of a bulk frame's head."""
    values = [3, 255, 0, 3, 0, 0, 1, 0, 100, 100]
    return Kind("frame", fields_of_values("Frame", values, _HEAD_NAMES), lambda w: list(values), lambda w, b: b, _head)


_HEADER_NAMES: Final = ["magic", "swarm", "epoch", "version", "attempt", "seq", "parent", "layout", "piece bytes",
                        "blocks", "block", "length", "hash", "block 2", "length 2", "hash 2", "piece 1", "piece 2",
                        "piece 3"]  # fmt: skip


def _header_values(scene: Any) -> list[Any]:
    digest = bytes(32)
    return [b"SWC1", AUTHORITY.public, 0, 4, 0, 0, digest, LAYOUT.hash, 14, 2, 0, 60_000, digest, 0, 60_001, digest,
            digest, digest, digest]  # fmt: skip


def header_kind() -> Kind:
    """Return the kind of a chunk header, signed by the authority."""
    return Kind(
        "chunk header",
        fields_of_values("ChunkHeader", _header_values(None), _HEADER_NAMES),
        _header_values,
        lambda scene, body: AUTHORITY.seal(chunks._DOMAIN, body),
        write,
        by_authority=True,
    )


_LAYOUT_NAMES: Final = ["magic", "tensors", "name", "dtype", "dimensions", "size", "size 2", "aliases", "name 2",
                        "dtype 2", "dimensions 2", "size 3", "aliases 2", "alias", "files", "file", "bytes",
                        "hash"]  # fmt: skip


def _layout_values(scene: Any) -> list[Any]:
    return [layouts._MAGIC, 2, "a.weight", "BF16", 2, 2048, 1024, 0, "b.bias", "F32", 1, 7, 1, "tied.bias",
            1, "config.json", 100, bytes(32)]  # fmt: skip


def layout_kind() -> Kind:
    """Return the kind of a layout as it arrives in a blob."""
    return Kind(
        "layout",
        fields_of_values("Layout", _layout_values(None), _LAYOUT_NAMES),
        _layout_values,
        lambda scene, body: body,
        write,
    )


_ROUTE_NAMES: Final = ["magic", "form", "experts", "chosen", "layers", "tokens", "length", "code"]


def _route_values(scene: Any) -> list[Any]:
    """Routes of three tokens. A code of other lengths or bytes is no encoder's."""
    return [b"R1", 1, 8, 2, 2, 3, len(_CODE), _CODE]


def routes_kind() -> Kind:
    """Return the kind of coded routes, as a rollout has them."""
    names = fields_of_values("Routes", _route_values(None), _ROUTE_NAMES)
    return Kind("routes", names, _route_values, lambda scene, body: body, write)


_ADAPTER_NAMES: Final = ["beyond the length", "version", "name", "base", "rank", "alpha", "module", "module 2",
                         "rank 2", "peft"]  # fmt: skip


def _adapter_values(scene: Any) -> list[Any]:
    return [0, 7, '"math"', f'"{LAYOUT.hash.hex()}"', "8", "16.0", '"a"', '"b"', "4", '{"peft_type":"LORA"}']


def _adapter_config(values: list[Any]) -> bytes:
    """Encode a slot's configuration. A number is added to the length, or is the version; all else is JSON."""
    beyond, version = ((value if isinstance(value, int) else 1) for value in (*values[:2], 0, 0)[:2])
    parts = [
        value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        for value in values[2:]
        if isinstance(value, str | bytes | msgspec.Raw)
    ]
    parts += [b"0"] * (8 - len(parts))
    name, base, rank, alpha, module, module2, rank2, peft = parts[:8]
    body = b'{"alpha":%s,"base":%s,"modules":[%s,[%s,%s]],"name":%s,"peft":%s,"rank":%s}' % (
        alpha, base, module, module2, rank2, name, peft, rank
    )  # fmt: skip
    length = (len(body) + beyond) % (1 << 32)
    head = length.to_bytes(4, "little") + (version % (1 << 64)).to_bytes(8, "little")
    return (head + body).ljust(CONFIG_BYTES, b"\0")


def adapter_kind() -> Kind:
    """Return the kind of the configuration in an adapter's slot."""
    return Kind(
        "adapter",
        fields_of_values("AdapterConfig", _adapter_values(None), _ADAPTER_NAMES),
        _adapter_values,
        lambda scene, body: body,
        _adapter_config,
    )


def open_all(message: wire.Message, scene: Scene) -> None:
    """Open every document in a message, as a peer does."""
    swarm = scene.swarm
    match message:
        case wire.Join():
            open_capability(message.capability, swarm)
        case wire.Hello():
            open_grant(message.grant, swarm)
        case wire.Welcome():
            open_grant(message.grant, swarm)
            open_heartbeat(message.heartbeat, swarm)
            open_whole(message.roster, swarm)
            open_manifest(message.manifest, swarm)
        case wire.Reports():
            for sealed in message.reports[:4]:
                open_report(sealed, swarm)
        case wire.Bye():
            open_report(message.release, swarm)
        case wire.HeartbeatNews():
            open_heartbeat(message.heartbeat, swarm)
        case wire.RosterNews():
            open_whole(message.roster, swarm)
        case wire.RosterStep():
            open_change(message.change, swarm)
            advance(scene.plan(), message.change, swarm)
        case wire.ManifestNews():
            open_manifest(message.manifest, swarm)
        case wire.Succession():
            open_successor(message.sealed, swarm)


class _World(World, Scene):
    def __init__(self) -> None:
        Scene.__init__(self)
        self._number = 0
        self.count = self._count

    def _count(self) -> int:
        self._number += 1
        return self._number

    def give(self, kind: Kind, data: bytes) -> str:
        try:
            if kind.name == "frame":
                wire.unpack_frame_head(data)
            elif kind.name == "chunk header":
                open_header(data, AUTHORITY.public)
            elif kind.name == "layout":
                _look_at(Layout.from_bytes(data))
            elif kind.name == "routes":
                read_header(data)
                ids = decode_routes(data, _SHAPE, 3)
                assert int(ids.max()) < _SHAPE.experts
            elif kind.name == "adapter":
                _look_at_adapter(data)
            elif kind.name.startswith("image/"):
                return _look_at_image(data)
            elif kind.name.startswith("Council/"):
                council.open_council(kind.name, data)
            elif kind.name.startswith("Saved/"):
                saved.open_saved(kind.name, data)
            elif kind.name.startswith("Work/"):
                message = work.decode(data)
                if isinstance(message, work.SignedRollout):
                    rollout = work.open_rollout(self.me.public, message.sealed)
                    unpack_tokens(rollout.token_ids)
                    unpack_floats(rollout.logprobs)
            else:
                open_all(wire.decode(data), self)
        except PeerError as error:
            return str(error)
        return "accepted"


def _look_at_adapter(data: bytes) -> None:
    """Read a slot as a node does. What is read must have exactly these bytes."""
    config = AdapterConfig.from_bytes(data)
    assert data == (bytes(CONFIG_BYTES) if config is None else config.to_bytes())
    if config is not None:
        config.tensors(LAYOUT)


def _look_at_image(data: bytes) -> str:
    """Read an image's header as the gateway and a node do."""
    try:
        check_images([data])
    except ValueError as error:
        return str(error)
    return "accepted"


def _look_at(layout: Layout) -> None:
    """Use a decoded layout as its first reader does."""
    assert layout.n_blocks >= 0
    assert layout.nbytes >= 0
    assert layout.to_bytes()
    if layout.n_blocks:
        layout.block(0)
        layout.block(layout.n_blocks - 1)


class Decoders(Target):
    """The target of this module."""

    name: ClassVar[str] = "decoders"
    about: ClassVar[str] = (
        "every message, document, header, layout, work body and adapter's configuration; a council's messages, and "
        "those of saved states"
    )
    episode: ClassVar[int] = FOREVER

    def __init__(self) -> None:
        self.kinds = [
            *message_kinds(),
            *document_kinds(),
            *work_kinds(),
            *council.council_kinds(),
            *saved.saved_kinds(),
            head_kind(),
            header_kind(),
            layout_kind(),
            routes_kind(),
            adapter_kind(),
            *image_kinds(),
        ]

    def world(self, rng: random.Random) -> World:
        return _World()

    def types(self) -> dict[str, Any]:
        from swarm.protocol.core import documents
        from swarm.protocol.membership import roster

        found: dict[str, Any] = {cls.__name__: cls for cls in messages.MESSAGES}
        found |= {f"Work/{cls.__name__}": cls for cls in work_messages()}
        found |= {f"Council/{cls.__name__}": cls for cls in (*council.MESSAGES, council.Change)}
        found |= {f"Saved/{cls.__name__}": cls for cls in (*saved.MESSAGES, *saved.DOCUMENTS)}
        carriers = {"Report": "Reports", "Grant": "Hello", "Heartbeat": "HeartbeatNews", "Capability": "Join"}
        found |= {f"{carriers[cls.__name__]}/{cls.__name__}": cls for cls in documents._DOMAINS}
        found |= {"RosterStep/Change": roster.Change, "RosterNews/Roster": roster.Roster, "Work/Rollout": work.Rollout}
        return found


def work_messages() -> tuple[type, ...]:
    """Return every message type of `node.ledger.messages`."""
    from scenarios.fuzz.inputs.work import MESSAGES

    return MESSAGES
