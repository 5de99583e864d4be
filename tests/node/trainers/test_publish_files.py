"""Publishing a checkpoint folder to a seed without a network: read by the seed, and by the process that asks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seed_kit import LAYOUT, FakeSeed, random_replica, running

from codec import BlockDelta, Layout, Replica, StagedBlock, TensorSpec, write_checkpoint
from codec.errors import UsageError
from codec.pack import MIN_CHUNK_BYTES
from node.coordinator.file_publisher import TURNS
from node.coordinator.publisher import Publisher
from node.coordinator.rank_group import RankGroup
from node.host.raw import raw_content
from node.host.stamp import stamp
from node.ipc.channel import connect
from node.ipc.ring import RingReader
from node.status.schema import SeedStatus
from node.trainers import publish_files
from node.trainers.attach import default_threads
from node.trainers.errors import PublishFailed
from node.trainers.file_messages import SOCKET_NAME, FilesEncoded, FilesOpened, FilesPublished, PublishFiles
from node.trainers.messages import (
    AskState,
    Attach,
    FromSeed,
    PublishBegin,
    PublishEnd,
    PublishOpened,
    PublishShared,
    SharedDelta,
)
from node.trainers.publish_files import publish_file, publish_folder
from node.trainers.publish_here import publish_file_here, publish_folder_here

Publish = Callable[..., dict[str, Any]]


@pytest.fixture(params=["seed", "here"])
def publish(request: pytest.FixtureRequest) -> Publish:
    return publish_folder if request.param == "seed" else publish_folder_here


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "step_1", LAYOUT, random_replica(seed=1).bits, {})
    return tmp_path / "step_1"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_seed_has_the_folders_bits(publish: Publish, home: Path, folder: Path) -> None:
    with running(home, FakeSeed(random_replica())) as seed:
        report = publish(home, folder, step=17)
        assert seed.seed.trainer_steps == [17]
        assert (report["version"], report["root"]) == (1, random_replica(seed=1).root.hex())
        assert seed.seed.receiver.root == random_replica(seed=1).root
        assert seed.seed.known_chunks > 0


def test_changes_are_listed_for_the_seed_while_they_are_few(
    publish: Publish, home: Path, folder: Path, tmp_path: Path
) -> None:
    after = random_replica(seed=1)
    for block, every in enumerate((50, 3, 2, 1000)[: after.layout.n_blocks]):
        after._writable(block)[::every] ^= 1
    after.rehash()
    write_checkpoint(tmp_path / "step_2", LAYOUT, after.bits, {})
    with running(home, FakeSeed(random_replica(seed=1))) as seed:
        publish(home, tmp_path / "step_2")
        assert seed.seed.receiver.root == after.root
        publish(home, folder)
        assert seed.seed.receiver.root == random_replica(seed=1).root


def test_a_second_name_of_tied_tensors_must_have_the_same_bits(publish: Publish, home: Path, tmp_path: Path) -> None:
    new = random_replica(seed=1)
    tensors = sorted((*LAYOUT.tensors[:2], TensorSpec("c.weight", "BF16", (64, 32)), LAYOUT.tensors[3]), key=_name)
    apart = Layout((*tensors, TensorSpec("tied.weight", "BF16", (64, 32))))
    for name, differs in (("same", 0), ("other", 1)):
        bits = {spec.name: new.bits("c.weight" if spec.name == "tied.weight" else spec.name) for spec in apart.tensors}
        bits["tied.weight"] = bits["tied.weight"] ^ np.uint16(differs)
        write_checkpoint(tmp_path / name, apart, bits.__getitem__, {})
    with running(home, FakeSeed(random_replica())) as seed:
        with pytest.raises(UsageError, match="are tied in the base"):
            publish(home, tmp_path / "other")
        publish(home, tmp_path / "same")
        assert seed.seed.receiver.root == new.root


def test_a_seed_that_reads_no_ring_gets_the_blocks_by_its_socket(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed of an older release."""
    new = random_replica()
    new._writable(0)[::50] ^= 1
    new.rehash()
    write_checkpoint(tmp_path / "step_1", LAYOUT, new.bits, {})
    monkeypatch.setattr("node.coordinator.rank_group.PublishOpened", lambda *fields, **later: PublishOpened(*fields))
    with running(home, FakeSeed(random_replica())) as seed:
        publish_folder_here(home, tmp_path / "step_1")
        assert seed.seed.receiver.root == new.root
        assert seed.seed.known_chunks == 0


def test_a_ring_that_is_full_is_waited_for(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.trainers.connection.link.RING_BYTES", 1 << 20)
    wide = Layout(tuple(TensorSpec(f"t{i:02}", "BF16", (1 << 18,)) for i in range(24)))
    new = random_replica(wide, seed=1)
    for block in range(0, wide.n_blocks, 2):  # half of them raw: two fill the ring
        new._writable(block)[:] = np.random.default_rng(block).integers(0, 1 << 16, 1 << 18)
    new.rehash()
    write_checkpoint(tmp_path / "step_1", wide, new.bits, {})
    with running(home, FakeSeed(random_replica(wide))) as seed:
        publish_folder_here(home, tmp_path / "step_1")
        assert seed.seed.receiver.root == new.root


def _name(spec: TensorSpec) -> str:
    return spec.name


def test_a_checkpoint_that_changes_while_it_is_read_is_not_published(
    publish: Publish, home: Path, folder: Path
) -> None:
    before = stamp(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with running(home, FakeSeed(random_replica())) as seed:
        with pytest.raises(UsageError, match="written to while it was read"):
            publish(home, folder, as_it_was=before)
        assert seed.seed.attempts == []


def _with(layout: Layout, kind: str) -> Layout:
    """The same layout, with `kind` in place of BF16."""
    return Layout(tuple(TensorSpec(s.name, kind if s.dtype == "BF16" else s.dtype, s.shape) for s in layout.tensors))


def test_masters_of_the_base_are_rounded(publish: Publish, home: Path, tmp_path: Path) -> None:
    """float32 checkpoints of a bf16 base, as a trainer with masters writes them."""
    new = random_replica(seed=1)
    masters = _with(LAYOUT, "F32")

    def widened(name: str) -> np.ndarray:
        bits = np.array(new.bits(name))
        if LAYOUT.tensor(name).dtype != "BF16":
            return bits
        bits[(bits & 0x7FFF) > 0x7F80] = 0x7FC0
        return (bits.astype(np.uint32) << 16) + np.uint32(0x1000)  # a little more than the bf16 value

    write_checkpoint(tmp_path / "step_2", masters, widened, {})
    with running(home, FakeSeed(random_replica())) as seed:
        publish(home, tmp_path / "step_2")
        for spec in LAYOUT.tensors:
            wanted = np.array(new.bits(spec.name))
            if spec.dtype == "BF16":
                wanted[(wanted & 0x7FFF) > 0x7F80] = 0x7FC0
            np.testing.assert_array_equal(seed.seed.receiver.bits(spec.name), wanted)


def test_another_dtype_is_another_model(publish: Publish, home: Path, tmp_path: Path) -> None:
    other = _with(LAYOUT, "F16")
    write_checkpoint(tmp_path / "step_3", other, random_replica(seed=1).bits, {})
    with running(home, FakeSeed(random_replica())), pytest.raises(UsageError, match="F16"):
        publish(home, tmp_path / "step_3")


def test_a_file_is_read_by_the_seed(home: Path, tmp_path: Path) -> None:
    parts = tuple(TensorSpec(f"file.bytes.{i:04}", "U8", (1 << 16,)) for i in range(40))
    replica = Replica.create(Layout((*parts, TensorSpec("file.length", "I64", ()))))
    replica.rehash()
    content = np.random.default_rng(1).bytes(2_000_000)
    (tmp_path / "file").write_bytes(content)
    with running(home, FakeSeed(replica)) as seed:
        report = publish_file(home, tmp_path / "file")
        assert raw_content(seed.seed.receiver).tobytes() == content
        assert report["delta_bytes"] > len(content)
        again = publish_file(home, tmp_path / "file")
        assert (again["version"], again["changed"]) == (2, 0)


def raw_replica(nbytes: int) -> Replica:
    """A replica for a raw file of up to `nbytes`, in blocks of 16 KiB."""
    parts = tuple(TensorSpec(f"file.bytes.{i:04}", "U8", (1 << 14,)) for i in range((nbytes >> 14) + 1))
    replica = Replica.create(Layout((*parts, TensorSpec("file.length", "I64", ()))))
    replica.rehash()
    return replica


def random_file(folder: Path, nbytes: int) -> Path:
    (folder / "file").write_bytes(np.random.default_rng(1).bytes(nbytes))
    return folder / "file"


def test_chunks_leave_while_later_blocks_are_read_but_not_each_block_by_itself(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swarm's links are busy from the beginning on; and each turn of the seed's loop has a price."""
    turns: list[int] = []

    async def add(publisher: Publisher, deltas: Sequence[BlockDelta], known: Sequence[StagedBlock] = ()) -> None:
        turns.append(sum(len(delta.payload) for delta in deltas))
        await really_add(publisher, deltas, known)

    really_add = Publisher.add
    monkeypatch.setattr(Publisher, "add", add)
    with running(home, FakeSeed(raw_replica(1 << 22))):
        publish_file(home, random_file(tmp_path, 1 << 22))
    assert TURNS // 2 < len(turns) <= TURNS + default_threads(1)
    assert max(turns) < 2 * (1 << 22) // TURNS


def test_a_rank_sends_no_batch_smaller_than_the_smallest_chunk(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch costs the seed a turn of its loop."""
    batches: list[int] = []

    async def add_shared(group: RankGroup, deltas: Sequence[SharedDelta], ring: RingReader) -> None:
        batches.append(sum(delta.payload for delta in deltas))
        await really_add(group, deltas, ring)

    really_add = RankGroup.add_shared
    monkeypatch.setattr(RankGroup, "add_shared", add_shared)
    with running(home, FakeSeed(raw_replica(1 << 20))):
        publish_file_here(home, random_file(tmp_path, 1 << 20))
    assert len(batches) == (1 << 20) // MIN_CHUNK_BYTES + 1
    assert min(batches[:-1]) >= MIN_CHUNK_BYTES


def test_what_the_seed_does_not_see_is_read_here(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed in a container, or one that is still loading the coder."""
    monkeypatch.setattr("node.coordinator.file_publisher._is_as_told", lambda path, asked: False)
    with running(home, FakeSeed(random_replica())) as seed:
        assert publish_folder(home, folder)["version"] == 1
        assert seed.seed.receiver.root == random_replica(seed=1).root


def test_an_older_seed_is_not_asked_twice(home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the request, and hangs up."""
    older = Attach | PublishBegin | PublishShared | PublishEnd | AskState
    monkeypatch.setattr("node.coordinator.trainer_server.FromTrainer", older)
    with running(home, FakeSeed(random_replica())) as seed:
        assert publish_folder(home, folder)["version"] == 1
        assert seed.seed.receiver.root == random_replica(seed=1).root


def test_a_command_that_ends_leaves_no_open_version(home: Path, folder: Path) -> None:
    with running(home, FakeSeed(random_replica())) as seed:
        seed.pause()
        with connect(home / SOCKET_NAME, FromSeed) as channel:
            channel.send(PublishFiles(str(folder), False, stamp(folder)))
            message, _ = channel.recv(10.0)
            assert isinstance(message, FilesOpened)
        seed.resume()
        deadline = time.monotonic() + 10.0
        while not seed.seed.abandoned and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seed.seed.abandoned == 1
        assert publish_folder(home, folder)["version"] == 1


def test_two_commands_at_once(home: Path, folder: Path) -> None:
    with running(home, FakeSeed(random_replica())) as seed:
        seed.pause()
        with connect(home / SOCKET_NAME, FromSeed) as channel:
            channel.send(PublishFiles(str(folder), False, stamp(folder)))
            assert isinstance(channel.recv(10.0)[0], FilesOpened)
            with pytest.raises(PublishFailed, match="Another trainer is publishing"):
                publish_folder(home, folder)
            seed.resume()
            messages = [channel.recv(10.0)[0] for _ in range(2)]
            assert [type(message) for message in messages] == [FilesEncoded, FilesPublished]
        assert seed.seed.head == (0, 1)


def test_asking_the_seed_imports_little(home: Path, folder: Path) -> None:
    """What a short-lived process imports costs more than what it does."""
    program = (
        "import sys; from pathlib import Path; from node.trainers.publish_files import publish_folder; "
        "publish_folder(Path(sys.argv[1]), Path(sys.argv[2])); "
        "print(*({'numpy', 'numba', 'trio', 'libp2p', 'torch'} & sys.modules.keys()))"
    )
    with running(home, FakeSeed(random_replica())) as seed:
        words = [sys.executable, "-c", program, str(home), str(folder)]
        ended = subprocess.run(words, capture_output=True, text=True, check=True)
        assert ended.stdout.strip() == ""
        assert seed.seed.head == (0, 1)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_seed_that_ended_is_asked_again_unless_it_had_sealed(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """Its answer to the first request was lost."""
    asked: list[PublishFiles] = []

    def ask(home: Path, request: PublishFiles) -> Any:
        asked.append(request)
        found = really_ask(home, request)
        return found._replace(published=None) if len(asked) == 1 else found

    really_ask = publish_files._ask
    monkeypatch.setattr(publish_files, "_ask", ask)
    fake = FakeSeed(random_replica())
    head = lambda: SeedStatus(head=fake.head, root=fake.replica.root.hex()) if sealed else SeedStatus()  # noqa: E731
    monkeypatch.setattr(fake, "status", head)
    with running(home, fake):
        report = publish_folder(home, folder)
    assert len(asked) == (1 if sealed else 2)
    assert report["root"] == random_replica(seed=1).root.hex()
    assert report["version"] == fake.head[1]
