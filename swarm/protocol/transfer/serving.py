"""Answers to requests for manifests, for members and the authority."""

from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import ManifestNews, WantManifest
from swarm.protocol.state import State

__all__ = ["serve_manifest"]


def serve_manifest(state: State, peer: bytes, want: WantManifest) -> None:
    """Answer with the manifest if we have it; otherwise do not answer."""
    id_ = VersionId(want.epoch, want.version)
    version = state.chunks.version(id_)
    if version is not None and version.manifest is not None:
        state.outbox.send(peer, ManifestNews(version.sealed_manifest))
    elif id_ in state.manifests:
        state.outbox.send(peer, ManifestNews(state.manifests[id_]))
