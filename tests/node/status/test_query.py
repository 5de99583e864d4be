"""Status over a real Unix socket."""

import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from codec.errors import UsageError
from node.status import query
from node.status.schema import NodeStatus, OwnStatus, SeedStatus, Status
from swarm.transport.base import Unreachable


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q") as folder:  # short: a socket's path has 107 bytes
        yield Path(folder)


async def test_each_question_gets_the_status_of_that_moment(home: Path) -> None:
    answers: Iterator[Status] = iter([SeedStatus(head=(0, 1)), NodeStatus(nodes=[OwnStatus(held=(0, 2))])])
    async with trio.open_nursery() as nursery:
        await nursery.start(query.serve, home, lambda: next(answers))
        assert await trio.to_thread.run_sync(query.ask, home) == SeedStatus(head=(0, 1))
        assert await trio.to_thread.run_sync(query.ask, home) == NodeStatus(nodes=[OwnStatus(held=(0, 2))])
        nursery.cancel_scope.cancel()


def test_no_process_answers(home: Path) -> None:
    with pytest.raises(Unreachable, match="swarm-node seed"):
        query.ask(home)


async def test_one_process_serves_a_home(home: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(query.serve, home, SeedStatus)
        with pytest.raises(UsageError, match="Another process"):
            await query.serve(home, SeedStatus)
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["home", "above it"])
def test_the_home_of_another_user_is_named(tmp_path: Path, closed: str) -> None:
    folder = tmp_path / "their files"
    (folder / "home").mkdir(parents=True)
    os.chmod(folder / "home" if closed == "home" else folder, 0o700)
    for above in folder.parents:  # pytest makes its folders for its own user
        if above.stat().st_uid == 0 and "pytest" in above.name:
            above.chmod(0o755)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            query.ask(folder / "home")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 4096).decode()
    assert text.startswith("Unreachable: "), text
    assert "belongs to the user root" in text
    assert shlex.split(text)[-7:] == ["sudo", "-u", "root", "swarm-node", "status", "--home", str(folder / "home")]


def test_ones_own_home_without_a_process_is_not_called_another_users(tmp_path: Path) -> None:
    for home in (tmp_path, tmp_path / "missing"):
        with pytest.raises(Unreachable, match="No swarm process answers in"):
            query.ask(home)
