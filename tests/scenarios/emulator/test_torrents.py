"""The torrent files for aria2 and libtorrent, and the installation of both."""

import hashlib
import subprocess
from collections.abc import Sequence

import pytest

from codec.errors import UsageError
from scenarios.emulator import torrents
from scenarios.emulator.torrents import PIECE_BYTES, encode, install, torrent


def test_bencoding() -> None:
    value = {b"b": [1, b"spam", -3], b"a": {b"": 0}}
    assert encode(value) == b"d1:ad0:i0ee1:bli1e4:spami-3eee"


def test_a_torrent_names_every_piece() -> None:
    content = bytes(PIECE_BYTES) + b"tail"
    encoded = torrent("file", content, "http://10.77.0.1:6969/announce")
    pieces = hashlib.sha1(bytes(PIECE_BYTES)).digest() + hashlib.sha1(b"tail").digest()
    assert b"6:pieces40:" + pieces in encoded
    assert b"6:lengthi%de" % len(content) in encoded
    assert encoded.startswith(b"d8:announce30:http://10.77.0.1:6969/announce4:infod")


def test_package_lists_are_fetched_before_aria2_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    def run(command: Sequence[str], **more: object) -> "subprocess.CompletedProcess[str]":
        commands.append(" ".join(command[:2]))
        return subprocess.CompletedProcess(command, 100 if command[1] == "install" else 0, "", "Reading\nE: no aria2\n")

    monkeypatch.setattr(torrents.shutil, "which", lambda name: None)
    monkeypatch.setattr(torrents.subprocess, "run", run)
    with pytest.raises(UsageError, match=r"^aria2 could not be installed: apt-get install .* printed: E: no aria2$"):
        install("aria2")
    assert commands == ["apt-get update", "apt-get install"]


def test_an_installed_program_is_not_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torrents.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torrents.subprocess, "run", lambda *args, **more: pytest.fail("nothing may be installed"))
    install("aria2")


def test_a_missing_apt_gives_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"^aria2 could not be installed: apt-get is missing\.$"):
        install("aria2")
