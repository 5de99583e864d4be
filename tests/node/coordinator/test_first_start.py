"""A first start of a seed that fails takes its new key back, and never one that another process may use."""

from pathlib import Path
from typing import Any

import pytest
import trio

from codec.errors import UsageError
from codec.sign import Key
from node.coordinator import coordinator
from node.coordinator.handover import Handover
from node.host.endpoint import open_store, store_folder
from node.settings import keyfile, logs
from node.settings.config import SeedConfig

WINNER = Key(bytes([7]) * 32)


@pytest.fixture(autouse=True)
def _no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)


def fail(home: Path, monkeypatch: pytest.MonkeyPatch, at: Any = None) -> None:
    """Start a seed in `home` that fails before it serves; `at`: what happens before that, given the key."""

    async def failing(_: SeedConfig, key: Key, __: Any) -> None:
        await trio.lowlevel.checkpoint()
        with open_store(home, key.public):
            pass
        if at is not None:
            at(key)
        raise UsageError("The port is taken.")

    monkeypatch.setattr(coordinator, "_run_with_key", failing)
    with pytest.raises(UsageError, match="The port is taken"):
        trio.run(coordinator.run, SeedConfig(home=home, raw_mb=1))


def test_a_failed_first_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(tmp_path, monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_first_starts_leaves_the_others_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / keyfile.AUTHORITY_KEY
    exists = Path.exists

    def too_early(asked: Path, **options: bool) -> bool:
        """The first to ask hears that there is no key, and then the other start makes one."""
        found = exists(asked, **options)
        if asked == path and not found:
            keyfile.write(path, WINNER)
        return found

    monkeypatch.setattr(Path, "exists", too_early)
    fail(tmp_path, monkeypatch)
    assert keyfile.load(path).public == WINNER.public


def test_a_key_with_which_another_seed_runs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = []
    fail(tmp_path, monkeypatch, lambda key: others.append(open_store(tmp_path, key.public)))
    key = keyfile.load(tmp_path / keyfile.AUTHORITY_KEY)
    assert store_folder(tmp_path, key.public).is_dir()
    others[0].close()


def test_a_seed_whose_new_key_was_taken_back_does_not_start(tmp_path: Path) -> None:
    """Another start made the key, this one read it, and the other one failed."""

    async def start() -> None:
        with trio.fail_after(30.0):
            config = SeedConfig(home=tmp_path, raw_mb=1, listen=("/ip4/127.0.0.1/tcp/0",))
            await coordinator._run_with_key(config, Key.generate(), trio.TASK_STATUS_IGNORED)

    for write in (lambda: None, lambda: keyfile.write(tmp_path / keyfile.AUTHORITY_KEY, WINNER)):
        write()
        with pytest.raises(UsageError, match="Start the seed again"):
            trio.run(start)


def test_no_key_is_made_while_members_wait_for_another(tmp_path: Path) -> None:
    """After rotate-key the old swarm's members follow to one new key; a third one would be alone."""
    Handover(WINNER.public, tmp_path / "retired.key").write(tmp_path)
    with pytest.raises(UsageError, match="--key, or run swarm-node rotate-key again"):
        trio.run(coordinator.run, SeedConfig(home=tmp_path, raw_mb=1))
    assert not (tmp_path / keyfile.AUTHORITY_KEY).exists()
    assert Handover.read(tmp_path) is not None
