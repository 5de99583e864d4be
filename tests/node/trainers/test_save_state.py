"""`save_state` from each kind of source, against a seed's socket in this process."""

import io
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from codec.errors import UsageError
from node.coordinator.state_saver import StateSaver
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.trainers import save_state as saving_module
from node.trainers.errors import PublishFailed, SwarmDown, SwarmTimeout
from node.trainers.file_messages import SOCKET_NAME, Refusal
from node.trainers.messages import FromTrainer
from node.trainers.save_state import StateSaving, save_state
from node.trainers.state_messages import SaveState
from swarm.guard import Source

CONTENT = b"state" * 100_000


class FakePlacer:
    """Reads the file, as coding it would, and waits for `go` in the place of nodes."""

    addresses = ("/ip4/10.0.0.1/tcp/4001",)

    def __init__(self) -> None:
        self.read: list[bytes] = []
        self.sources: list[Path] = []
        self.go = trio.Event()
        self.go.set()

    async def save(self, source: Path, step: int, tell: Callable[[str, int, int], None]) -> Any:
        self.sources.append(source)
        try:
            self.read.append(await trio.Path(source).read_bytes())
        except OSError as error:
            raise UsageError(f"Cannot read {source}: {error.strerror}.") from error
        tell("placing", 1, 4)
        await self.go.wait()
        return SimpleNamespace(record=SimpleNamespace(serial=7, size=len(self.read[-1]), needed=2, total=4))


@asynccontextmanager
async def served(home: Path, placer: Any) -> AsyncIterator[None]:
    saver = StateSaver(placer)

    async def converse(channel: AsyncChannel) -> None:
        message, _ = await channel.recv()
        assert isinstance(message, SaveState)
        try:
            await saver.converse(channel, message)
        except UsageError as error:
            await channel.send(Refusal(str(error), usage=True))

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        await serve_socket(
            home / SOCKET_NAME, converse, receives=FromTrainer, source=Source.TRAINER, task_status=task_status
        )

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        yield
        nursery.cancel_scope.cancel()


async def over(saving: StateSaving) -> StateSaving:
    return await trio.to_thread.run_sync(saving.wait, 20.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
        await trio.sleep(0.02)


def left_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


def in_parts() -> Iterator[bytes]:
    for at in range(0, len(CONTENT), 1000):
        yield CONTENT[at : at + 1000]


class NoSeek:
    """Can be read once."""

    def __init__(self, content: bytes) -> None:
        self.read = io.BytesIO(content).read


@pytest.mark.parametrize(
    "kind", ["bytes", "bytearray", "memoryview", "file", "at its end", "stream", "iterable", "path", "text"]
)
async def test_every_kind_of_source_is_saved_as_it_is(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    sources: dict[str, Any] = {
        "bytes": CONTENT, "bytearray": bytearray(CONTENT), "memoryview": memoryview(CONTENT),
        "file": io.BytesIO(CONTENT), "at its end": io.BytesIO(CONTENT), "stream": NoSeek(CONTENT),
        "iterable": in_parts(), "path": tmp_path / "file", "text": str(tmp_path / "file"),
    }  # fmt: skip
    sources["at its end"].seek(len(CONTENT))  # as `torch.save` leaves it
    placer = FakePlacer()
    async with served(tmp_path, placer):
        saving = await over(save_state(tmp_path, sources[kind], 3))
    assert placer.read == [CONTENT]
    assert (saving.serial, saving.size, saving.fragments) == (7, len(CONTENT), (2, 4))
    assert (saving.stage, saving.saved, saving.nodes) == ("saved", True, placer.addresses)
    assert 0 < saving.seconds < 20
    assert left_in(tmp_path / "state") == [], "no copy of it stays"


async def test_it_tells_how_far_it_is_and_returns_at_once(tmp_path: Path) -> None:
    placer = FakePlacer()
    placer.go = trio.Event()
    async with served(tmp_path, placer):
        saving = save_state(tmp_path, CONTENT, 3)
        await until(lambda: (saving.stage, saving.done, saving.total) == ("placing", 1, 4))
        assert not saving.over
        with pytest.raises(SwarmTimeout, match="step 3 was not saved within 0 s"):
            saving.wait(0.05)
        placer.go.set()
        await over(saving)


async def test_a_source_that_fails_is_told_where_it_is_waited_for(tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"begin"
        raise RuntimeError("no more")

    async with served(tmp_path, FakePlacer()):
        for source, error, why in (
            (failing(), PublishFailed, "RuntimeError: no more"),
            (io.StringIO("text"), PublishFailed, "TypeError"),
            (tmp_path / "none", UsageError, "Cannot read"),
        ):
            saving = save_state(tmp_path, source, 3)
            with pytest.raises(error, match=why):
                await over(saving)
            assert (saving.stage, saving.saved, saving.over) == ("failed", False, True)
    assert os.listdir(tmp_path / "state") == []


async def test_a_seed_that_is_started_again_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakePlacer(), FakePlacer()
    first.go = trio.Event()
    async with served(tmp_path, first):
        saving = save_state(tmp_path, CONTENT, 3)
        await until(lambda: saving.stage == "placing")
    async with served(tmp_path, second):
        await over(saving)
    assert second.read == [CONTENT]
    monkeypatch.setattr(saving_module, "RESTARTED_WITHIN_S", 0.5)
    with pytest.raises(SwarmDown, match="No seed serves"):
        await over(save_state(tmp_path, CONTENT, 3))
    with pytest.raises(UsageError, match="step"):
        save_state(tmp_path, CONTENT, -1)


async def test_a_relative_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absolute"):
        await StateSaver(FakePlacer()).converse(None, SaveState("here"))  # type: ignore[arg-type]


async def failure(saving: StateSaving) -> str:
    with pytest.raises(UsageError) as raised:
        await over(saving)
    return str(raised.value)


async def test_an_empty_state_is_no_state(tmp_path: Path) -> None:
    placer = FakePlacer()
    async with served(tmp_path, placer):
        for empty in (b"", io.BytesIO(), iter(())):
            assert "The state is empty" in await failure(save_state(tmp_path, empty, 3))
    assert placer.sources == []
    assert os.listdir(tmp_path / "state") == []


async def test_the_seed_is_told_which_file_a_name_means_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "link").symlink_to(tmp_path / "file")  # as /dev/stdin is one
    placer = FakePlacer()
    async with served(tmp_path, placer):
        await over(save_state(tmp_path, tmp_path / "link", 3))
    assert placer.sources == [(tmp_path / "file").resolve()]


async def test_a_copy_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_module, "ROOM_EVERY_BYTES", 10_000)
    left = [100, 90, 40, 4]

    def usage(folder: Path) -> Any:
        return SimpleNamespace(total=100, free=left.pop(0))

    monkeypatch.setattr(saving_module.shutil, "disk_usage", usage)
    placer = FakePlacer()
    async with served(tmp_path, placer):
        assert "too little for this state" in await failure(save_state(tmp_path, in_parts(), 3))
    assert left == []
    assert placer.sources == []
    assert os.listdir(tmp_path / "state") == []


async def test_a_copy_takes_and_removes_no_file_of_another_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_module.secrets, "token_hex", lambda size: "same")
    other = tmp_path / "state" / ".coming-same"
    other.parent.mkdir()
    other.write_bytes(b"of another one")
    assert "Cannot write the state" in await failure(save_state(tmp_path, CONTENT, 3))
    assert other.read_bytes() == b"of another one"
