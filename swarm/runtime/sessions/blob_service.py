"""What this member gives on request, and checks of what it requested: layouts, files, hash lists, blocks.

Nothing that arrives is trusted. A layout or file must have the hash by which it was requested. A hash list must add up
to the root by which it was requested. A block must have the hash in the list of its version, which this member must
already hold.
"""

from collections import OrderedDict
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import ChunkKey, Layout, state_root
from codec.errors import PeerError
from codec.layout import MAX_LAYOUT_BYTES
from swarm.protocol.core.events import Event, PartsDone, SendBlob, SendBlock, UnknownLabel, VersionId
from swarm.protocol.core.wire import Blob as BlobKind
from swarm.protocol.core.wire import WantBlob, WantBlock
from swarm.runtime.replica.format_blocks import FormatBlocks
from swarm.runtime.replica.jobs import Jobs
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.sessions.outbound import Blob
from swarm.runtime.sessions.requests import PeerAnswer, Requests
from swarm.runtime.threads import RunSync, in_thread
from swarm.store import Store

__all__ = ["BlobService", "cost_of", "model_bytes"]

_MAX_FILE_BYTES: Final = 64 << 20
"""The layout has the same bound for its files."""
_LISTS_KEPT: Final = 4
"""Verified hash lists that stay in memory, the most recently loaded ones."""
_NO_VERSION: Final = ChunkKey(0, 0, 0, 0)


class BlobService:
    """Looks up what peers request; checks and stores what this member requested."""

    def __init__(self, store: Store, jobs: Jobs, manifests: Manifests, run_sync: RunSync = in_thread) -> None:
        self._store = store
        self._jobs = jobs
        self._blocks = FormatBlocks(jobs.model)
        self._manifests = manifests
        self._run_sync = run_sync
        self._newest_request: dict[int, tuple[bytes, int]] = {}
        """By block: (peer, request number) of the newest request for it. Only its answer is written."""
        self._last_file: tuple[bytes, bytes | None] = b"", None
        """(hash, content)"""
        self._lists: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()
        """Verified hash lists, uint8 (n_blocks, 32), by root."""

    # ------------------------------------------------------------ giving

    async def find_blob(self, effect: SendBlob | SendBlock) -> Blob | None:
        """What a peer requested; None when this member does not have it."""
        if isinstance(effect, SendBlock):
            found = await self._run_sync(self._blocks.read_block, effect.block)
            if found is None:
                return None
            version, data = found
            return _blob(data, _label(version))
        if effect.kind == BlobKind.HASHES:
            hashes = await self._run_sync(self._hash_list, effect.name)
            version = self._manifests.version(effect.name)
            if hashes is None or version is None:
                return None
            return _blob(hashes.tobytes(), _label(version))
        data = await self._run_sync(self._file, effect.name)
        return None if data is None else _blob(data, _NO_VERSION)

    # ------------------------------------------------------------ asking

    def note_request(self, peer: bytes, requests: Requests, want: WantBlob | WantBlock) -> None:
        """Note in `requests` that `want` is sent to `peer`, and how many bytes the answer may have."""
        layout = self._jobs.model.layout
        if isinstance(want, WantBlock) or want.kind == BlobKind.HASHES:
            assert layout is not None, "asked for parts of a model whose layout we lack"
            if isinstance(want, WantBlock):
                self._newest_request[want.block] = peer, want.request
                requests.note(want, layout.block(want.block).nbytes, exact=True)
            else:
                requests.note(want, 32 * layout.n_blocks, exact=True)
        else:
            max_bytes = MAX_LAYOUT_BYTES if want.kind == BlobKind.LAYOUT else _MAX_FILE_BYTES
            requests.note(want, max_bytes, exact=False)

    async def accept_answer(self, peer: bytes, answer: PeerAnswer) -> Event | None:
        """Verify and store a complete answer. Returns the event that tells the core; None for a block that was
        requested from another peer meanwhile. Raises `PeerError` when the answer does not verify."""
        want = answer.want
        if isinstance(want, WantBlock):
            return await self._accept_block(peer, want, answer)
        if want.kind == BlobKind.HASHES:
            differs = await self._run_sync(self._accept_hashes, want.name, answer.data)
            version = self._manifests.version(want.name)
            assert version is not None, "a hash list was asked for by a root that no manifest named"
            return PartsDone(peer, want.request, version, differs=differs, size_bytes=len(answer.data))
        needs = await self._run_sync(self._accept_file, want, answer.data)
        return PartsDone(peer, want.request, answer.label, needs=needs, size_bytes=len(answer.data))

    async def _accept_block(self, peer: bytes, want: WantBlock, answer: PeerAnswer) -> Event | None:
        if self._newest_request.get(want.block) != (peer, want.request):
            return None  # the core counts the answer of the newer request only
        root = self._manifests.root(answer.label)
        hashes = None if root is None else await self._run_sync(self._hash_list, root)
        if hashes is None:
            return UnknownLabel(peer, want.request, answer.label)
        expected = hashes[want.block].tobytes()
        await self._run_sync(self._jobs.model.write_block, want.block, answer.data, expected, answer.label)
        if self._newest_request.get(want.block) == (peer, want.request):  # nobody else was asked during the write
            del self._newest_request[want.block]
        return PartsDone(peer, want.request, answer.label, size_bytes=len(answer.data))

    # ------------------------------------------------------------ in a worker thread

    def _file(self, name: bytes) -> bytes | None:
        """A layout or small file by its hash. The last one is kept in memory: a peer that requests the last byte of
        64 MiB again and again must not make this member read and hash the file each time."""
        known, data = self._last_file
        if known != name:
            data = self._store.file(name)
            if data is not None:
                self._last_file = name, data
        return data

    def _accept_file(self, want: WantBlob, data: bytes) -> tuple[bytes, ...]:
        """Store a layout or file. Returns the hashes of the files that a layout names and the store lacks."""
        if blake3(data).digest() != want.name:
            raise PeerError(f"blob.hash: not the {'layout' if want.kind == BlobKind.LAYOUT else 'file'} asked for")
        layout = Layout.from_bytes(data) if want.kind == BlobKind.LAYOUT else None
        self._store.put_file(data)
        return () if layout is None else self._store.lacking(layout, self._jobs.model.base)

    def _accept_hashes(self, root: bytes, data: bytes) -> tuple[int, ...]:
        """Store a hash list. Returns the blocks in which the replica differs from it."""
        layout = self._jobs.model.layout
        assert layout is not None
        hashes = np.frombuffer(data, np.uint8).reshape(-1, 32)
        if state_root(layout.hash, hashes) != root:
            raise PeerError("hashes: they do not add up to the root")
        self._store.put_hashes(root, hashes)
        return self._jobs.model.differing(hashes)

    def _hash_list(self, root: bytes) -> NDArray[np.uint8] | None:
        """The block hashes of a root, uint8 (n_blocks, 32), verified once; None when the store has none."""
        found = self._lists.get(root)
        if found is None:
            found, layout = self._store.hashes(root), self._jobs.model.layout
            if found is None or layout is None or state_root(layout.hash, found) != root:
                return None
            self._lists[root] = found
            if len(self._lists) > _LISTS_KEPT:
                self._lists.popitem(last=False)
        return found


def cost_of(layout: Layout, want: WantBlob | WantBlock) -> int:
    """Payload bytes of a valid answer to this request."""
    if isinstance(want, WantBlock):
        return layout.block(want.block).nbytes if want.block < layout.n_blocks else 0
    if want.kind == BlobKind.HASHES:
        total = 32 * layout.n_blocks
    elif want.kind == BlobKind.LAYOUT:
        total = len(layout.to_bytes())
    else:
        total = next((spec.size for spec in layout.files if spec.hash == want.name), 0)
    return max(0, total - want.offset)


def model_bytes(layout: Layout) -> int:
    """Payload bytes that a member without anything needs: layout, files, hash list, blocks."""
    files = sum(spec.size for spec in layout.files)
    return len(layout.to_bytes()) + files + 32 * layout.n_blocks + layout.full_bytes


def _label(version: VersionId) -> ChunkKey:
    return ChunkKey(version.epoch, version.version, 0, 0)


def _blob(data: bytes, label: ChunkKey) -> Blob:
    return Blob(label, len(data), lambda offset, size: data[offset : offset + size])
