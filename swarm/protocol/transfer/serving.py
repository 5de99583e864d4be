"""Answers to requests for chunks and manifests, for members and the authority."""

from codec import ChunkKey
from swarm.protocol.core.events import SendHeader, SendPiece
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import LacksChunk, ManifestNews, Offer, Skip, WantChunk, WantManifest
from swarm.protocol.state import State
from swarm.protocol.transfer.chunks import mask_of

__all__ = ["key_of", "serve_chunk", "serve_manifest"]


def key_of(message: Skip | LacksChunk | WantChunk | Offer) -> ChunkKey:
    """The key of the chunk that a message names."""
    return ChunkKey(message.epoch, message.version, message.attempt, message.seq)


def serve_chunk(state: State, peer: bytes, want: WantChunk, now: float) -> None:
    """Answer a pull with the header and the requested pieces that we hold, or with `LacksChunk`.

    There is no answer if the pieces are already being sent to the peer.
    """
    key = key_of(want)
    chunk = state.chunks.find(key) if state.exchange.gives else None
    pieces = mask_of(want.pieces, chunk.full) & chunk.have if chunk is not None else 0
    if state.uploads.busy(peer, key):
        return
    if chunk is not None and state.exchange.take_back(peer, chunk, pieces, now):
        return
    if chunk is None or not pieces or state.uploads.full(peer):
        state.outbox.send(peer, LacksChunk(want.epoch, want.version, want.attempt, want.seq))
        return
    asked = state.exchange.paid(peer, chunk, [index for index in range(len(chunk.sizes)) if pieces >> index & 1])
    if not asked:
        state.outbox.send(peer, LacksChunk(want.epoch, want.version, want.attempt, want.seq))
        return
    state.uploads.begin(peer, key, 1 + len(asked))
    state.exchange.gave(peer, chunk, asked, now)
    state.outbox.emit(SendHeader(peer, chunk.stripe, key, pull=True))
    for index in asked:
        state.outbox.emit(SendPiece(peer, chunk.stripe, key, index, pull=True))


def serve_manifest(state: State, peer: bytes, want: WantManifest) -> None:
    """Answer with the manifest if we have it; otherwise do not answer."""
    id_ = VersionId(want.epoch, want.version)
    version = state.chunks.version(id_)
    if version is not None and version.manifest is not None:
        state.outbox.send(peer, ManifestNews(version.sealed_manifest))
    elif id_ in state.manifests:
        state.outbox.send(peer, ManifestNews(state.manifests[id_]))
