"""The key file: private, whole, never overwritten."""

import errno
import os
from pathlib import Path

import pytest

from codec.errors import UsageError
from codec.sign import Key
from node.settings import keyfile


def test_round_trip_and_mode(tmp_path: Path) -> None:
    path, key = tmp_path / "deep" / "er" / "a.key", Key.generate()
    keyfile.write(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keyfile.load(path).public == key.public


def test_never_overwritten(tmp_path: Path) -> None:
    path, key = tmp_path / "a.key", Key.generate()
    keyfile.write(path, key)
    with pytest.raises(UsageError, match="never overwritten"):
        keyfile.write(path, Key.generate())
    assert keyfile.load(path).public == key.public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.key"
    keyfile.write(path, Key.generate())
    path.chmod(mode)
    with pytest.raises(UsageError, match="chmod 600"):
        keyfile.load(path)


@pytest.mark.parametrize("content", [b"", b"swarm-key-1:abc", b"\xff" * 80, b"swarm-key-1:" + b"g" * 64, b"x" * 10_000])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="not a swarm-node key file"):
        keyfile.load(path)


def test_a_missing_key_is_reported_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="swarm-node keygen"):
        keyfile.load(tmp_path / "a.key")


def test_a_machine_keeps_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "home" / keyfile.NODE_KEY
    assert keyfile.load_or_make(path).public == keyfile.load_or_make(path).public


def test_one_call_makes_the_key(tmp_path: Path) -> None:
    path = tmp_path / keyfile.AUTHORITY_KEY
    assert [keyfile.make(path), keyfile.make(path)] == [True, False]


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write"):
        keyfile.write(tmp_path / "file" / "a.key", Key.generate())


@pytest.mark.parametrize("fails", ["fsync", "link"])
def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(keyfile.os, fails, full)
        if fails == "link":
            patched.setattr(keyfile.os, "replace", full)
            patched.setattr(keyfile.os, "open", _no_new_name)
        with pytest.raises(UsageError, match="No space left"):
            keyfile.write(tmp_path / "key", Key.generate())
    assert list(tmp_path.iterdir()) == []
    keyfile.write(tmp_path / "key", Key.generate())
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


_open = os.open


def _no_new_name(path: Path, flags: int, *mode: int) -> int:
    if flags & os.O_EXCL:
        raise OSError(errno.ENOSPC, "No space left on device")
    return _open(path, flags, *mode)


def test_a_file_system_without_links_gets_the_key_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(keyfile.os, "link", refused)
    key = Key.generate()
    keyfile.write(tmp_path / "key", key)
    assert keyfile.load(tmp_path / "key").public == key.public
    with pytest.raises(UsageError, match="never overwritten"):
        keyfile.write(tmp_path / "key", Key.generate())
    assert keyfile.load(tmp_path / "key").public == key.public
