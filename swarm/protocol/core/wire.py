"""The control messages and the heads of bulk frames, as bytes.

Participants: one *authority* (the trainer's seed, whose Ed25519 key is the swarm's name) and its *members*. A control
stream carries length-prefixed messages both ways; a bulk stream carries frames one way. Non-goals: confidentiality from
members (they hold the weights anyway), anonymity.

A message is one byte of protocol version and a MessagePack array `[tag, field...]`. Every field is bounded here, before
anything is built from it; bytes that break a rule raise `PeerError`. Documents that the authority signed (`bytes`
fields named `grant`, `roster`, `heartbeat`, `manifest`) travel as the exact bytes that it signed; see `documents`,
`roster` and `codec`.
"""

from struct import Struct as Packing
from typing import Annotated, Final, NamedTuple

import msgspec

from codec import ChunkKey
from codec.errors import PeerError
from codec.shards import MAX_RANKS
from codec.unpack import unpack

__all__ = [
    "FRAME_HEAD",
    "MAX_FRAME_BODY",
    "MAX_LATE_WANTS",
    "MAX_MESSAGE_BYTES",
    "PROTOCOL",
    "Attach",
    "Blob",
    "Bye",
    "Credit",
    "Detach",
    "Frame",
    "FrameKind",
    "Have",
    "HeartbeatNews",
    "Hello",
    "Join",
    "Lacks",
    "LacksChunk",
    "LateChunkWants",
    "ManifestNews",
    "Message",
    "Neighbour",
    "Offer",
    "Ping",
    "Pong",
    "Refused",
    "Reports",
    "RosterNews",
    "RosterStep",
    "Skip",
    "Succession",
    "WantBlob",
    "WantBlock",
    "WantChunk",
    "WantManifest",
    "WantRoster",
    "Welcome",
    "Work",
    "decode",
    "encode",
    "pack_frame",
    "unpack_frame_head",
]

PROTOCOL: Final = 1
MAX_MESSAGE_BYTES: Final = 4 << 20
"""Bytes of the longest message that is read. A roster of 10,000 members is 1.3 MB."""
MAX_DOCUMENT: Final = 3 << 20
"""Bytes of a signed document: a manifest of 98,000 chunks."""
MAX_WORK: Final = 1 << 20
"""Bytes of a `Work` body: a rollout of 65,536 tokens takes half of it."""
MAX_LATE_WANTS: Final = 24
"""Chunks that one `LateChunkWants` may name."""

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Sealed = Annotated[bytes, msgspec.Meta(max_length=MAX_DOCUMENT)]
SmallSealed = Annotated[bytes, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Ranks = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)], ...], msgspec.Meta(max_length=MAX_RANKS)]
FormatName = Annotated[str, msgspec.Meta(max_length=64)]
Mbit = Annotated[float, msgspec.Meta(ge=0, le=1e7)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Root of all control messages."""


class Join(Message, frozen=True, tag=1):
    """To the authority: let me in. The only message that a peer without a grant may send."""

    capability: SmallSealed
    addrs: Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]
    name: Annotated[str, msgspec.Meta(max_length=64)]
    region: Annotated[str, msgspec.Meta(max_length=64)]
    up_mbit: Mbit
    down_mbit: Mbit
    relay_only: bool
    shards: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)] = 0
    """Over how many ranks the joiner takes experts to be dealt, of which it is to hold `ranks`; 0: it is to hold the
    whole model. Without a shard neither field is sent, as the first releases did not."""
    ranks: Ranks = ()
    form: FormatName = ""
    """The format that the joiner is to hold, of those of `codec.formats`; empty: none. Not sent when empty."""


class Neighbour(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member that can be asked, and where it can be dialed."""

    peer: Key32
    addrs: Annotated[tuple[Address, ...], msgspec.Meta(max_length=16)]


class Welcome(Message, frozen=True, tag=2):
    """From the authority: your grant, and the state of the swarm. A large roster is not sent here: `neighbours` have
    it."""

    grant: SmallSealed
    roster: Sealed
    heartbeat: SmallSealed
    manifest: Sealed
    neighbours: Annotated[tuple[Neighbour, ...], msgspec.Meta(max_length=16)] = ()


class Refused(Message, frozen=True, tag=3):
    """Refusal of a `Join` or `Hello`. `code` is for programs, `why` for people."""

    code: Annotated[str, msgspec.Meta(max_length=32)]
    why: Text


class Hello(Message, frozen=True, tag=4):
    """First message of either end of a session with a member; the serials tell the other end what is newer there."""

    grant: SmallSealed
    roster: U63
    heartbeat: U63
    epoch: U32
    version: U63


class RosterNews(Message, frozen=True, tag=5):
    """A newer roster, whole: an answer to `WantRoster`."""

    roster: Sealed


class HeartbeatNews(Message, frozen=True, tag=6):
    """A newer heartbeat; passed on once to every child."""

    heartbeat: SmallSealed


class ManifestNews(Message, frozen=True, tag=7):
    """The seal of a version; passed on once to every child, and the answer to `WantManifest`."""

    manifest: Sealed


class Reports(Message, frozen=True, tag=8):
    """Signed reports (renewals) on their way up the tree of `stripe`; receivers outside that tree drop them."""

    stripe: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    reports: Annotated[tuple[SmallSealed, ...], msgspec.Meta(max_length=4096)]


class Have(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which pieces of a chunk are held: `pieces` is a little-endian bit set; empty means all of them."""

    epoch: U32
    version: U63
    attempt: U32
    seq: U32
    pieces: Annotated[bytes, msgspec.Meta(max_length=128)]


class Attach(Message, frozen=True, tag=9):
    """To a parent: push me stripe `stripe` of every version after (epoch, version), less what I have."""

    stripe: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    epoch: U32
    version: U63
    credit: U63
    have: Annotated[tuple[Have, ...], msgspec.Meta(max_length=65536)]


class Detach(Message, frozen=True, tag=10):
    """To a parent: push me this stripe no more."""

    stripe: Annotated[int, msgspec.Meta(ge=0, lt=64)]


class Credit(Message, frozen=True, tag=11):
    """To a parent: you may send me `total` bytes of this stripe, counted since I attached."""

    stripe: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    total: U63
    behind: U63 = 0
    """Bytes that wait here for each of my own children, on average."""


class WantChunk(Message, frozen=True, tag=12):
    """Send me the header of this chunk and these of its pieces (bit set; empty means all)."""

    epoch: U32
    version: U63
    attempt: U32
    seq: U32
    pieces: Annotated[bytes, msgspec.Meta(max_length=128)]


class LacksChunk(Message, frozen=True, tag=13):
    """Answer to `WantChunk`: I hold none of that."""

    epoch: U32
    version: U63
    attempt: U32
    seq: U32


class Blob:
    """Kinds of blob. A `layout` is named by its hash, a `file` by its hash, `hashes` (all block hashes of a version, 32
    bytes each) by the state root they add up to."""

    LAYOUT: Final = 1
    FILE: Final = 2
    HASHES: Final = 3


class WantBlob(Message, frozen=True, tag=14):
    """Send me this blob, from this offset on, as `PART` frames bearing my request number."""

    request: U32
    kind: Annotated[int, msgspec.Meta(ge=1, le=3)]
    name: Key32
    offset: U63


class WantBlock(Message, frozen=True, tag=15):
    """Send me this block of the replica, as you hold it now, as `PART` frames labelled with its version."""

    request: U32
    block: U63


class Lacks(Message, frozen=True, tag=16):
    """Answer to `WantBlob` or `WantBlock`: I do not have it, or may not send it."""

    request: U32


class WantManifest(Message, frozen=True, tag=17):
    """Send me the manifest of this version (`ManifestNews`, or nothing)."""

    epoch: U32
    version: U63


class Work(Message, frozen=True, tag=18):
    """Work leases and rollouts, for the application; the swarm checks their size only."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_WORK)]


class Bye(Message, frozen=True, tag=19):
    """I end this session. `release`: the sender's signed report with `leaving` set, which frees its slot at once. If it
    is empty, the sender stays, but keeps few sessions; dial again when you have something to send."""

    release: SmallSealed


class RosterStep(Message, frozen=True, tag=20):
    """The change that led to a newer roster; passed on once, down two trees."""

    change: Sealed


class WantRoster(Message, frozen=True, tag=21):
    """I have the roster of this stamp (0: none): send me the changes since (`RosterStep`), or all (`RosterNews`)."""

    have: U63


class Ping(Message, frozen=True, tag=22):
    """Answer at once with `Pong`: measures the round trip."""

    nonce: U32


class Pong(Message, frozen=True, tag=23):
    """Answer to `Ping`."""

    nonce: U32


class Skip(Message, frozen=True, tag=24):
    """To a parent: I get this chunk from elsewhere. Do not send what you have not sent yet, unless I ask for it."""

    stripe: Annotated[int, msgspec.Meta(ge=0, lt=64)]
    epoch: U32
    version: U63
    attempt: U32
    seq: U32


class LateChunkWants(Message, frozen=True, tag=25):
    """To a neighbour: these chunks are late here. Offer me one if you hold it and have uplink to spare. Replaces my
    last list; empty: none is late."""

    epoch: U32
    version: U63
    attempt: U32
    seqs: Annotated[tuple[U32, ...], msgspec.Meta(max_length=MAX_LATE_WANTS)]


class Offer(Message, frozen=True, tag=26):
    """Answer to `LateChunkWants`: ask me for this chunk, and I send it now."""

    epoch: U32
    version: U63
    attempt: U32
    seq: U32


class Succession(Message, frozen=True, tag=27):
    """This swarm has a new key: leave it and join the swarm that is named here. Passed on once to all neighbours. See
    `succession`."""

    sealed: SmallSealed


_ALL = (
    Join | Welcome | Refused | Hello | RosterNews | HeartbeatNews | ManifestNews | Reports | Attach | Detach | Credit
    | WantChunk | LacksChunk | WantBlob | WantBlock | Lacks | WantManifest | Work | Bye
    | RosterStep | WantRoster | Ping | Pong | Skip | LateChunkWants | Offer | Succession
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ALL)


def encode(message: Message) -> bytes:
    """`message` as it travels (without the stream's length prefix)."""
    fields: object = message
    if isinstance(message, Join) and not message.form:
        unsent = 1 if message.shards or message.ranks else 3
        fields = (Join.__struct_config__.tag, *msgspec.structs.astuple(message)[:-unsent])
    data = bytes((PROTOCOL,)) + _encoder.encode(fields)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{type(message).__name__}: {len(data)} bytes is more than a message may have")
    return data


def decode(data: bytes) -> Message:
    """The message in `data`; `PeerError` unless it is exactly one well-formed message of our protocol version."""
    if not 1 < len(data) <= MAX_MESSAGE_BYTES:
        raise PeerError(f"message: {len(data)} bytes")
    if data[0] != PROTOCOL:
        raise PeerError(f"message: protocol version {data[0]}, ours is {PROTOCOL}")
    return unpack(_decoder, memoryview(data)[1:], "message")


class FrameKind:
    """What a bulk frame holds: a chunk's signed header, a piece of its body, or a part of a blob or block."""

    HEADER: Final = 1
    PIECE: Final = 2
    PART: Final = 3


class Frame(NamedTuple):
    """The fixed head of a bulk frame; `length` bytes of body follow.

    HEADER and PIECE: `key` and `stripe` (255: none) and, for a piece, its index as `number`. PART: `key` is the
    version that the bytes belong to (attempt and seq 0), `number` the request's; `offset` and `total` place the body in
    the whole.
    """

    kind: int
    stripe: int
    key: ChunkKey
    number: int
    offset: int
    total: int
    length: int


_FRAME = Packing("<BBIQIIIQQI")
FRAME_HEAD: Final = _FRAME.size
MAX_FRAME_BODY: Final = 1 << 20
"""The header of a chunk with thousands of tiny blocks is the largest body; pieces are at most 256 KiB, parts 128
KiB."""
NO_STRIPE: Final = 255


def pack_frame(frame: Frame) -> bytes:
    """The head of a frame; the body follows on the stream."""
    key = frame.key
    return _FRAME.pack(
        frame.kind, frame.stripe, key.epoch, key.version, key.attempt, key.seq,
        frame.number, frame.offset, frame.total, frame.length,
    )  # fmt: skip


def unpack_frame_head(head: bytes) -> Frame:
    """A frame's head from its `FRAME_HEAD` bytes; `PeerError` when a field is out of bounds."""
    if len(head) != FRAME_HEAD:
        raise PeerError(f"frame: a head of {len(head)} bytes, not {FRAME_HEAD}")
    kind, stripe, epoch, version, attempt, seq, number, offset, total, length = _FRAME.unpack(head)
    if kind not in (FrameKind.HEADER, FrameKind.PIECE, FrameKind.PART):
        raise PeerError(f"frame: kind {kind}")
    if length > MAX_FRAME_BODY:
        raise PeerError(f"frame: {length} bytes of body")
    if version >= 1 << 63:  # our own messages would name it, and be refused
        raise PeerError(f"frame: version {version}")
    if kind == FrameKind.PART and (offset + length > total or total > 1 << 40):
        raise PeerError("frame: part outside its whole")
    return Frame(kind, stripe, ChunkKey(epoch, version, attempt, seq), number, offset, total, length)
