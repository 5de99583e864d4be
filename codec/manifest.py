"""Manifests: the root over all blocks of a version, and the chunks that lead to it, under the trainer's seal.

Two nodes with the same root hold the same model, bit for bit. The manifest lists the chunks that lead from the parent
root to the new root. A node uses no part of a version before the root that it computes from its own blocks equals the
manifest's.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from codec.errors import PeerError
from codec.sign import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Key, open_sealed
from codec.varint import Reader, Writer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MAX_MANIFEST_BYTES", "Manifest", "claimed_swarm", "open_manifest", "state_root"]

_ROOT_DOMAIN: Final = b"swarm-node root 1\0"
_DOMAIN: Final = b"swarm-node manifest 1"
_MAGIC: Final = b"SWM1"
_MAX_CHUNKS: Final = 1 << 20
MAX_MANIFEST_BYTES: Final = 32 * _MAX_CHUNKS + 1024
"""The ids of `_MAX_CHUNKS` chunks, and room for the other fields and the signature."""


def state_root(layout_hash: bytes, block_hashes: "NDArray[np.uint8] | Any") -> bytes:
    """BLAKE3 of the layout's hash and all block hashes, 32 bytes. `block_hashes`: uint8 (n_blocks, 32), in order."""
    import numpy as np  # a relay reads manifests, and computes no root

    assert len(layout_hash) == 32
    return blake3(_ROOT_DOMAIN + layout_hash + np.ascontiguousarray(block_hashes).tobytes()).digest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one version's seal. `swarm`: the authority's public key.

    `payload_bytes`: F, the bytes of all chunks, headers included. `changed`: elements that differ from the parent's.
    """

    swarm: bytes
    epoch: int
    version: int
    attempt: int
    parent_root: bytes
    root: bytes
    layout_hash: bytes
    chunk_ids: tuple[bytes, ...]
    payload_bytes: int
    changed: int

    def seal(self, key: Key) -> bytes:
        """The signed encoding; `open_manifest` is the inverse."""
        out = Writer(_MAGIC + self.swarm)
        for number in (self.epoch, self.version, self.attempt):
            out.uint(number)
        for digest in (self.parent_root, self.root, self.layout_hash):
            out.raw(digest)
        out.uint(self.payload_bytes)
        out.uint(self.changed)
        out.uint(len(self.chunk_ids))
        for digest in self.chunk_ids:
            out.raw(digest)
        body = bytes(out.data)
        assert _read(body) == self, "a field is out of bounds"
        return key.seal(_DOMAIN, body)


def claimed_swarm(sealed: bytes) -> bytes:
    """The public key that a sealed manifest names, not verified. Raises `PeerError` when it is too short for one."""
    key = sealed[SIGNATURE_BYTES + len(_MAGIC) :][:PUBLIC_KEY_BYTES]
    if len(key) != PUBLIC_KEY_BYTES:
        raise PeerError(f"manifest: {len(sealed)} bytes")
    return key


def open_manifest(sealed: bytes, authority: bytes) -> Manifest:
    """Verify and decode a sealed manifest. `authority`: the swarm's public key. Raises `PeerError` naming the field."""
    if not SIGNATURE_BYTES < len(sealed) <= MAX_MANIFEST_BYTES:
        raise PeerError(f"manifest: {len(sealed)} bytes, at most {MAX_MANIFEST_BYTES}")
    manifest = _read(open_sealed(authority, _DOMAIN, sealed))
    if manifest.swarm != authority:
        raise PeerError("manifest.swarm: belongs to another swarm")
    return manifest


def _read(body: bytes) -> Manifest:
    reader = Reader(body, "manifest")
    if reader.raw("magic", len(_MAGIC)) != _MAGIC:
        raise PeerError("manifest.magic: not a manifest of this version")
    swarm = reader.raw("swarm", 32)
    epoch, version, attempt = (reader.uint(field) for field in ("epoch", "version", "attempt"))
    parent_root, root, layout_hash = (reader.raw(field, 32) for field in ("parent root", "root", "layout hash"))
    payload_bytes, changed = reader.uint("payload bytes"), reader.uint("changed")
    ids = tuple(reader.raw("chunk id", 32) for _ in range(reader.uint("chunk ids", _MAX_CHUNKS)))
    if len(set(ids)) != len(ids):
        raise PeerError("manifest.chunk ids: one occurs twice")
    reader.end()
    return Manifest(swarm, epoch, version, attempt, parent_root, root, layout_hash, ids, payload_bytes, changed)
