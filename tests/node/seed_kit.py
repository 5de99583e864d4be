"""A seed without a network, for tests of the trainer's side: real trainer server, publisher and ledger.

Chunks go to one replica that stands for all nodes; it verifies, stages and applies them as a node does.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import trio

from codec import Chunk, ChunkKey, Key, Layout, Manifest, Replica, TensorSpec, open_header, open_manifest
from codec.chunk import CODER_RICE, BlockEntry, verify_piece
from codec.errors import UsageError
from codec.parts import BASE, Part
from node.coordinator.publisher import Attempt
from node.coordinator.trainer_server import TrainerServer
from node.ledger.book import Book
from node.ledger.messages import (
    Cannot,
    RewardClaim,
    Rollout,
    SignedRollout,
    Verdict,
    VersionSpan,
    WorkLease,
    WorkRequest,
    decode,
    encode,
    seal_rollout,
    work_hash,
)
from node.ledger.packing import pack_floats, pack_tokens, unpack_tokens
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.state import Head
from node.status.schema import MemberStatus, SeedStatus
from node.trainers.connection.seedlink import SOCKET_NAME
from node.trainers.messages import Evict, Evicted
from swarm.runtime.replica.own import OwnChunk
from swarm.store import Seal

LAYOUT = Layout(
    (
        TensorSpec("a.weight", "BF16", (1100, 1000)),  # two blocks
        TensorSpec("b.bias", "BF16", (7,)),
        TensorSpec("c.weight", "BF16", (64, 32), ("tied.weight",)),
        TensorSpec("d.scale", "F32", ()),
    )
)


def random_replica(layout: Layout = LAYOUT, seed: int = 0) -> Replica:
    replica = Replica.create(layout)
    random = np.random.default_rng(seed)
    for tensor in layout.tensors:
        values = random.standard_normal(tensor.elements).astype(np.float32)
        words = values.view(np.uint32) if tensor.dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
        for i, block in enumerate(layout.blocks_of(tensor.name)):
            spec = layout.block(block)
            replica._writable(block)[:] = words[i * (1 << 20) : i * (1 << 20) + spec.count]
    replica.rehash()
    return replica


class MemoryRecords:
    """Implements `node.coordinator.slots.SlotRecords`."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put(self, records, *, drop=()) -> None:
        for name in drop:
            self.held.pop(name, None)
        self.held |= dict(records)

    def all(self, prefix: str = "") -> dict[str, bytes]:
        return {name: value for name, value in self.held.items() if name.startswith(prefix)}


class FakeSeed:
    """Implements `node.coordinator.publisher.VersionSink`. `receiver` is the replica of the nodes."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.key = Key(b"k" * 32)
        self.receiver = Replica.create(replica.layout)
        for block in range(replica.layout.n_blocks):
            self.receiver.write_block(block, replica.read_block(block), replica.hashes[block].tobytes())
        self.head = (0, 0)
        self.members: list[MemberStatus] = []
        """What the status says of the members; empty: three without engines."""
        self.records = MemoryRecords()
        self.files: dict[str, bytes] = {}
        """The small files of the base."""
        self.seals: list[Seal] = []
        self.kept: dict[bytes, list[Any]] = {}
        """The bits of every version, by root and block."""
        self._remember(Manifest(self.key.public, 0, 0, 0, b"\0" * 32, replica.root, replica.layout.hash, (), 0, 0))
        self.attempts: list[Attempt] = []
        self.abandoned = 0
        self.next_coder = CODER_RICE
        self.coders: set[int] = set()
        """The coders of all blocks received so far."""
        self.known_chunks = 0
        """Chunks that came with a list of what they change."""
        self.staged: list[Any] = []
        self.chunks: list[bytes] = []
        self.payloads: dict[tuple[ChunkKey, int], tuple[BlockEntry, bytes]] = {}
        """By chunk and block."""
        self.manifests: list[Manifest] = []
        self.sealed_parts: list[frozenset[Part]] = []
        self.trainer_steps: list[int | None] = []
        self.on_sealed: Any = lambda head: None
        self.on_begun: Any = lambda version: None
        self.on_abandoned: Any = lambda: None
        self.slow = trio.Event()
        self.slow.set()

    def coder(self) -> int:
        return self.next_coder

    async def find(self, root: bytes | None, version: int | None) -> Seal:
        for seal in reversed(self.seals):
            if root == seal.root or version == seal.id.version:
                return seal
        raise UsageError("This swarm has no such version.")

    async def open_attempt(
        self, back_to: Seal | None = None, trainer_step: int | None = None, part: Part = BASE
    ) -> Attempt:
        epoch, version = self.head
        name = (epoch, version + 1) if back_to is None else (epoch + 1, back_to.id.version)
        tries = sum(attempt[:2] == name for attempt in self.attempts)
        self.attempts.append(Attempt(*name, tries, self.replica.root, 0, 1))
        self.trainer_steps.append(trainer_step)
        await trio.lowlevel.checkpoint()
        self.on_begun(name)
        return self.attempts[-1]

    async def rewind(self, to: Seal, skip: range = range(0)):
        for block in (block for block in range(self.replica.layout.n_blocks) if block not in skip):
            new = self.kept[to.root][block]
            delta = self.replica.encode_block(block, new)
            if delta is not None:
                yield [(delta, int(np.count_nonzero(self.replica.block(block) != new)))]

    def _remember(self, manifest: Manifest) -> None:
        self.seals.append(Seal.of(manifest, manifest.seal(self.key)))
        self.kept[manifest.root] = [self.replica.block(b).copy() for b in range(self.replica.layout.n_blocks)]

    def payload(self, key: ChunkKey, block: int) -> tuple[BlockEntry, bytes] | None:
        return self.payloads.get((key, block))

    async def add_chunk(self, chunk: Chunk, known: OwnChunk | None = None) -> None:
        await self.slow.wait()
        header = open_header(chunk.header, self.key.public)
        attempt = self.attempts[-1]
        assert header.key == (attempt.epoch, attempt.version, attempt.attempt, len(self.chunks))
        for i in range(header.n_pieces):
            piece = header.piece_range(i)
            verify_piece(header, i, chunk.body[piece.start : piece.stop])
        self.coders |= {block.coder for block in header.blocks}
        payloads = header.payloads(chunk.body)
        for entry, payload in zip(header.blocks, payloads, strict=True):
            self.payloads[header.key, entry.block] = entry, bytes(payload)
        staged = self.receiver.stage(header, chunk.body)
        self.staged.append(staged)
        if known is not None:
            self.known_chunks += 1
            decoded = {block.block: block for block in staged}
            for block in known.blocks:
                np.testing.assert_array_equal(block.positions, decoded[block.block].positions)
                np.testing.assert_array_equal(block.bits, decoded[block.block].bits)
        self.chunks.append(chunk.id)

    async def seal(self, manifest: Manifest, parts: frozenset[Part]) -> bytes:
        found = open_manifest(manifest.seal(self.key), self.key.public)
        assert found.chunk_ids == tuple(self.chunks)
        assert self.receiver.predicted_root(self.staged) == found.root
        self.receiver.scatter(self.staged)
        self.replica.scatter(self.staged)
        self.manifests.append(found)
        self.sealed_parts.append(parts)
        self.staged, self.chunks = [], []
        self.head = (found.epoch, found.version)
        self._remember(found)
        self.on_sealed(Head(found.epoch, found.version, found.root))
        return found.root

    async def abandon(self) -> None:
        self.abandoned += 1
        self.on_abandoned()
        self.staged, self.chunks = [], []

    async def evict(self, request: Evict) -> Evicted:
        return Evicted(False, [])  # there are no members

    def status(self) -> SeedStatus:
        members = self.members or [MemberStatus(held=held) for held in (self.head, (0, 0), None)]
        return SeedStatus(head=self.head, model_bytes=1000, nodes=members)


class FakeNode:
    """Answers every lease at once: token 9 for each sample, then the stop token 2."""

    def __init__(self, seed: FakeSeed, key: Key) -> None:
        self.seed, self.key, self.serial = seed, key, 0
        self.service: LedgerService
        self.verdicts: list[Verdict] = []
        self.paused = False
        self.cannot: set[tuple[int, ...]] = set()
        """Prompts that its engine refuses."""
        self.claim: Callable[[int], RewardClaim] = lambda sample: RewardClaim(float(sample))
        """The reward of each sample by its number, where one is asked for."""

    def ask(self) -> None:
        self.serial += 1
        request = WorkRequest(self.serial, 8, *self.seed.head, self.seed.replica.root, 50.0, ())
        self.service.hear(self.key.public, encode(request))

    async def send(self, node: bytes, body: bytes) -> None:
        match decode(body):
            case WorkLease() as lease if unpack_tokens(lease.prompt) in self.cannot:
                self.service.hear(self.key.public, encode(Cannot(lease.lease, lease.token, "it is too hard")))
            case WorkLease() as lease if not self.paused:
                for sample in lease.samples:
                    self.service.hear(self.key.public, encode(SignedRollout(self.draw(lease, sample))))
                self.ask()
            case Verdict() as verdict:
                self.verdicts.append(verdict)

    def draw(self, lease: WorkLease, sample: int) -> bytes:
        tokens = (9, 10 + sample, 2)
        rollout = Rollout(
            lease=lease.lease,
            token=lease.token,
            sample=sample,
            work=work_hash(lease.group, sample, lease.prompt, lease.sampling),
            token_ids=pack_tokens(tokens),
            logprobs=pack_floats((-0.5, -1.0, -2.0)),
            finish_reason="stop",
            spans=(VersionSpan(*self.seed.head, self.seed.replica.root, 3),),
            reward=None if lease.sampling.extra.reward is None else self.claim(sample),
        )
        return seal_rollout(self.key, rollout)


class RunningSeed:
    """A seed that serves `home` from a separate thread, as a separate process would."""

    def __init__(self, home: Path, seed: FakeSeed) -> None:
        self.home, self.seed = home, seed
        self.node = FakeNode(seed, Key(b"n" * 32))
        self._ready = threading.Event()
        self._token: trio.lowlevel.TrioToken
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        assert self._ready.wait(10)

    async def _main(self) -> None:
        book = Book(self.home / "ledger.sqlite")
        ledger = book.restore(Settings(), Head(*self.seed.head, self.seed.replica.root), trio.current_time())
        self.service = LedgerService(ledger, book, self.node.send)
        self.node.service = self.service
        self.seed.on_sealed = self.service.sealed
        self.seed.on_begun, self.seed.on_abandoned = self.service.begun, self.service.abandoned
        trainer_server = TrainerServer(self.seed, self.service, lambda: self.seed.files)
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.service.run)
                await nursery.start(
                    lambda task_status: trainer_server.run(self.home / SOCKET_NAME, task_status=task_status)
                )
                self._ready.set()
                while True:
                    self.node.ask()
                    await trio.sleep(2.0)
        book.close()

    def call(self, function, *args):
        """Run `function` in the seed's thread."""
        return trio.from_thread.run_sync(function, *args, trio_token=self._token)

    def pause(self) -> None:
        """The seed accepts no chunk until `resume`."""
        self.call(lambda: setattr(self.seed, "slow", trio.Event()))

    def resume(self) -> None:
        self.call(lambda: self.seed.slow.set())

    def stop(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self.call(self._scope.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def running(home: Path, seed: FakeSeed | None = None) -> Iterator[RunningSeed]:
    found = RunningSeed(home, seed or FakeSeed(random_replica()))
    try:
        yield found
    finally:
        found.stop()
