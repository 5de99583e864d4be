"""Fetches the weights of the newest version that nodes hold, and writes them as a checkpoint folder.

As a catch-up does it: layout and hash list by the root that the swarm's key has signed, then every block, from all
nodes side by side, each compared with its hash in that list. The blocks come into a file in which they lie as in a
replica; an attempt that was interrupted hashes what is there and fetches the rest.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
import trio
from blake3 import blake3
from numpy.typing import NDArray

from codec import Layout, Manifest, open_manifest, state_root, write_checkpoint
from codec.bits import Bits
from codec.errors import PeerError, UsageError
from codec.layout import MAX_LAYOUT_BYTES
from codec.parts import base_layout
from node.saved.messages import AskVersion, Body, FetchBlob, FetchBlock, Message, Version
from node.saved.sources import NodeSource, Sources
from swarm.guard import Source, guarded
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Blob
from swarm.runtime.threads import in_thread
from swarm.store.disk import Disk

__all__ = ["FetchedWeights", "fetch_weights"]

BLOCK_S: Final = 60.0
"""For a block, of 2 MiB at bf16: a node with less than 0.3 Mbit/s is not asked for another one. For the answer to any
other question, too."""
MIN_BYTES_S: Final = 250_000
"""A layout, hash list or file may take `BLOCK_S`, and a second more for each `MIN_BYTES_S`."""
LOOK_S: Final = 0.05
_BLOCKS: Final = "{root}.blocks"


class FetchedWeights(NamedTuple):
    """What was written. `nbytes`: of the tensors."""

    version: VersionId
    root: bytes
    nbytes: int


async def fetch_weights(
    sources: Sources, swarm: bytes, folder: Path, out: Path, tell: Callable[[int, int], None]
) -> FetchedWeights:
    """Fetch the newest version that the sources hold, and write its base model to the new folder `out`.

    `folder`: where blocks are put while they come. `tell(done, total)`: bytes. Raises `UsageError` when no source has a
    version, or they do not give all of it.
    """
    manifest, nodes = await _newest(sources, swarm)
    layout = Layout.from_bytes(await _named(sources, nodes, Blob.LAYOUT, manifest.layout_hash, MAX_LAYOUT_BYTES))
    hashes = await _hashes(sources, nodes, manifest, layout)
    base = base_layout(layout)
    files = {spec.name: await _named(sources, nodes, Blob.FILE, spec.hash, spec.size) for spec in base.files}
    blocks = _BlockFile(folder / _BLOCKS.format(root=manifest.root.hex()), base, hashes)
    try:
        await _fetch_blocks(sources, nodes, manifest.root, blocks, tell)
        await in_thread(write_checkpoint, out, base, blocks.parts, files)
    finally:
        blocks.close()
    return FetchedWeights(VersionId(manifest.epoch, manifest.version), manifest.root, base.nbytes)


async def _newest(sources: Sources, swarm: bytes) -> tuple[Manifest, list[NodeSource]]:
    """The newest version that a source holds, and the sources that hold it."""
    held: list[tuple[Manifest, NodeSource]] = []

    async def ask(node: NodeSource) -> None:
        with guarded(Source.STREAM, node.peer) as outcome, trio.fail_after(BLOCK_S):
            async with node.turn:
                version: Version = await node.conversation.ask(AskVersion(), Version)
            if version.manifest:
                held.append((open_manifest(version.manifest, swarm), node))
        if outcome.error is not None:
            sources.drop(node, outcome.why)

    async with trio.open_nursery() as nursery:
        for node in list(sources.nodes):
            nursery.start_soon(ask, node)
    if not held:
        raise UsageError("No node that answers holds a version of the model. Name others with --node.")
    newest = max((found for found, _ in held), key=lambda each: (each.epoch, each.version))
    return newest, [node for found, node in held if found.root == newest.root]


async def _ask_bytes(node: NodeSource, question: Message, max_bytes: int) -> bytes:
    async with node.turn:
        body: Body = await node.conversation.ask(question, Body)
        if body.size > max_bytes:
            raise PeerError(f"saved state: {body.size} bytes, at most {max_bytes}")
        with trio.fail_after(BLOCK_S + body.size / MIN_BYTES_S):
            return await node.conversation.body(body.size)


Checked = TypeVar("Checked")


async def _first_right(
    sources: Sources, nodes: list[NodeSource], question: FetchBlob, max_bytes: int, check: Callable[[bytes], Checked]
) -> Checked:
    """What `check` makes of the answer of the first source whose answer it does not raise `PeerError` for."""
    for node in list(nodes):
        with guarded(Source.STREAM, node.peer) as outcome:
            return check(await _ask_bytes(node, question, max_bytes))
        nodes.remove(node)
        sources.drop(node, outcome.why)
    raise _given_up(sources)


async def _named(sources: Sources, nodes: list[NodeSource], kind: int, name: bytes, max_bytes: int) -> bytes:
    """A layout or file by its BLAKE3."""

    def check(data: bytes) -> bytes:
        if blake3(data).digest() != name:
            raise PeerError("saved state: a file with another hash")
        return data

    return await _first_right(sources, nodes, FetchBlob(kind, name), max_bytes, check)


async def _hashes(sources: Sources, nodes: list[NodeSource], manifest: Manifest, layout: Layout) -> NDArray[np.uint8]:
    """The block hashes of the version, uint8 (n_blocks, 32), which add up to its root."""

    def check(data: bytes) -> NDArray[np.uint8]:
        if len(data) != 32 * layout.n_blocks:
            raise PeerError("hashes: not one for each block")
        hashes = np.frombuffer(data, np.uint8).reshape(-1, 32)
        if state_root(layout.hash, hashes) != manifest.root:
            raise PeerError("hashes: they do not add up to the root")
        return hashes

    asked = FetchBlob(Blob.HASHES, manifest.root)
    return await _first_right(sources, nodes, asked, 32 * layout.n_blocks, check)


async def _fetch_blocks(
    sources: Sources, nodes: Sequence[NodeSource], root: bytes, blocks: "_BlockFile", tell: Callable[[int, int], None]
) -> None:
    left = await in_thread(blocks.lacking)
    left.reverse()
    sizes = {block: blocks.layout.block(block).nbytes for block in left}
    """Of the blocks that are not here yet."""
    total, here = blocks.layout.nbytes, blocks.layout.nbytes - sum(sizes.values())

    async def work(node: NodeSource) -> None:
        nonlocal here
        while sizes:
            if not left:  # others fetch the rest, and may fail
                await trio.sleep(LOOK_S)
                continue
            block = left.pop()
            with guarded(Source.STREAM, node.peer) as outcome, trio.fail_after(BLOCK_S):
                data = await _ask_bytes(node, FetchBlock(root, block), sizes[block])
                await in_thread(blocks.write, block, data)
            if outcome.error is not None:
                left.append(block)
                sources.drop(node, outcome.why)
                return
            here += sizes.pop(block)
            tell(here, total)

    tell(here, total)
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(work, node)
    if sizes:
        raise _given_up(sources)


def _given_up(sources: Sources) -> UsageError:
    return UsageError(
        f"The nodes that answer do not give the whole model ({'; '.join(sources.errors[-3:])}). Run it again, and name "
        "more nodes with --node: what has come is kept."
    )


class _BlockFile:
    """The blocks of a model in a file, each where it lies in a replica. Not durable: what it has is hashed again."""

    def __init__(self, path: Path, layout: Layout, hashes: NDArray[np.uint8]) -> None:
        self.layout, self._hashes = layout, hashes
        self._is_new = not path.exists()
        with Disk().errors(path):
            self._file = open(  # noqa: SIM115 - `close` closes it
                path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600)
            )
            self._file.truncate(max(1, layout.nbytes))
        self._mapped = mmap.mmap(self._file.fileno(), 0)

    def lacking(self) -> list[int]:
        """The blocks that are not here, in order."""
        blocks = range(self.layout.n_blocks)
        return [block for block in blocks if self._is_new or not self._is_here(block)]

    def _is_here(self, block: int) -> bool:
        return blake3(bytes(self._slice(block))).digest() == self._hashes[block].tobytes()

    def _slice(self, block: int) -> memoryview:
        spec = self.layout.block(block)
        return memoryview(self._mapped)[spec.offset : spec.offset + spec.nbytes]

    def write(self, block: int, data: bytes) -> None:
        """Take a block. Several threads may do so. Raises `PeerError` when it has another hash."""
        if blake3(data).digest() != self._hashes[block].tobytes():
            raise PeerError(f"block.hash: block {block} does not have the expected hash")
        Disk().write_at(self._file.fileno(), data, self.layout.block(block).offset, Path(self._file.name))

    def parts(self, name: str) -> Iterator[Bits]:
        """The tensor, block by block, each hashed once more as it is read: a disk may return something else."""
        for block in self.layout.blocks_of(name):
            spec = self.layout.block(block)
            if not self._is_here(block):
                raise PeerError(f"block.hash: block {block} was damaged on this disk")
            yield np.frombuffer(self._mapped, spec.dtype.bits, spec.count, spec.offset)

    def close(self) -> None:
        """Close the file; it stays for another attempt."""
        self._file.close()
