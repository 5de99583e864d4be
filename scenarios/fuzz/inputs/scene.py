"""The sender of messages and the valid documents from which messages are made.

A world is a scene or has one. The default scene is a swarm of two: an authority, and a member at slot 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from blake3 import blake3

from codec import ChunkKey, Layout, Manifest, TensorSpec
from codec.chunk import BlockDelta, seal_chunk
from codec.layout import FileSpec
from codec.sign import Key
from swarm.protocol.core.documents import Capability, Grant, Heartbeat, Link, Report, bit_set, seal
from swarm.protocol.membership.roster import Change, Member, Roster, seal_change, whole

__all__ = ["AUTHORITY", "LAYOUT", "Scene", "key_of", "manifest_of", "root_of"]


@cache
def key_of(name: str) -> Key:
    """Return a key that depends only on the name."""
    return Key(blake3(name.encode()).digest())


AUTHORITY = key_of("authority")
LAYOUT = Layout(
    (TensorSpec("a.weight", "BF16", (2048, 1024)), TensorSpec("b.bias", "F32", (7,), ("tied.bias",))),
    (FileSpec("config.json", 100, bytes(32)),),
)


def root_of(epoch: int, version: int) -> bytes:
    """Return the made-up state root of a version."""
    return blake3(f"root {epoch} {version}".encode()).digest()


def manifest_of(version: int, chunks: tuple[bytes, ...] = (), epoch: int = 0, attempt: int = 0) -> Manifest:
    """Return the manifest of a version."""
    parent = root_of(epoch, version - 1) if version else bytes(32)
    root = root_of(epoch, version)
    return Manifest(AUTHORITY.public, epoch, version, attempt, parent, root, LAYOUT.hash, chunks, 1000, 10)


@dataclass
class Scene:
    """`me`: the sender's key. `beat`: the sealed heartbeat that reports name. `count()`: the next report number."""

    authority: Key = AUTHORITY
    me: Key = field(default_factory=lambda: key_of("member"))
    slot: int = 1
    serial: int = 1
    boot: int = 1
    time: float = 1000.0
    beat: bytes = b""
    beat_serial: int = 1
    roster: Roster | None = None
    version: int = 3
    other_slot: int = 0
    stripe: int = 0
    count: Callable[[], int] = lambda: 1

    @property
    def swarm(self) -> bytes:
        return self.authority.public

    def capability(self) -> Capability:
        return Capability(self.swarm, bytes(16), 1e9, 100, 1 << 40)

    def grant(self) -> Grant:
        return Grant(self.swarm, self.me.public, self.slot, self.serial, self.time, bytes(16))

    def heartbeat(self) -> Heartbeat:
        live = bit_set(range(16))
        return Heartbeat(self.swarm, self.boot, self.beat_serial + 1, self.time + 1, 1, 0, self.version, live, live)

    def report(self, *, leaving: bool = False) -> Report:
        beat = blake3(self.beat).digest()
        return Report(
            self.swarm, self.me.public, self.slot, self.serial, self.count(), beat, 0, self.version, 0, self.version,
            "echo", 1000, 1000, 12.5, leaving, 1.0, (self.other_slot,), (Link(self.other_slot, 1000, 10, 20),), 1000,
            ((self.other_slot, 1000),), False,
        )  # fmt: skip

    def member(self, slot: int, key: Key) -> Member:
        return Member(slot, key.public, (f"/ip4/198.51.100.{slot}/tcp/4001",), True, f"n{slot}", "eu", 100.0, False)

    def plan(self) -> Roster:
        """Return the scene's roster, or one of two members."""
        if self.roster is not None:
            return self.roster
        members = (self.member(0, key_of("other")), self.member(self.slot, self.me))
        return Roster(self.swarm, self.boot, 1, ("/ip4/198.51.100.9/tcp/4001",), members, ((-1, 0), (1, -1)))

    def change(self) -> Change:
        old = self.plan()
        altered = (self.member(self.slot, self.me),)
        moves = tuple(((self.slot, -1),) for _ in range(old.stripes))
        return Change(self.swarm, old.boot, old.serial + 1, old.stamp, old.authority, (0,), altered, moves, old.digest)

    def whole(self, body: bytes, roster: Roster | None = None) -> bytes:
        """Return a whole roster of these bytes, with a signed change that names their hash. Empty: the real bytes."""
        roster = roster or self.plan()
        stripes = ((),) * roster.stripes
        change = Change(
            self.swarm, roster.boot, roster.serial, 0, roster.authority, (), (), stripes, blake3(body).digest()
        )
        sealed = seal_change(change, self.authority)
        return whole(roster, sealed) if not body else _whole(sealed, body)

    def manifest(self) -> Manifest:
        return manifest_of(self.version + 1, (bytes(32), b"\1" * 32))

    def header(self) -> bytes:
        """Return the sealed header of a chunk of the next version."""
        deltas = [BlockDelta(block, block % 3, bytes(32), bytes(20_000)) for block in (0, 1)]
        key = ChunkKey(0, self.version + 1, 0, 0)
        return seal_chunk(key, root_of(0, self.version), LAYOUT.hash, deltas, self.authority).header

    # Documents that the authority signs and every member passes on. A world overrides these with its newest ones.

    def sealed_heartbeat(self) -> bytes:
        return self.seal_of(self.heartbeat())

    def sealed_roster(self) -> bytes:
        return self.whole(b"")

    def sealed_change(self) -> bytes:
        return seal_change(self.change(), self.authority)

    def sealed_manifest(self) -> bytes:
        return self.manifest().seal(self.authority)

    def seal_of(self, document: Capability | Grant | Heartbeat | Report) -> bytes:
        """Seal a document: a report with the sender's key, any other with the authority's."""
        return seal(document, self.me if isinstance(document, Report) else self.authority)


def _whole(change: bytes, body: bytes) -> bytes:
    import msgspec

    return msgspec.msgpack.encode((change, body))


def block_hashes() -> np.ndarray:
    """Return made-up block hashes of the layout: zeros, uint8 [n_blocks, 32]."""
    return np.zeros((LAYOUT.n_blocks, 32), np.uint8)
