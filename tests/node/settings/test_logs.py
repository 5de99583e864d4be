"""Log lines go to stderr, as JSON when it is no terminal."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from codec.errors import UsageError
from node.settings import logs
from node.settings.event_log import EventLog
from swarm.transport.identity import peer_id


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    structlog.reset_defaults()
    logs.forget()
    root.handlers[:] = before[1]
    root.setLevel(before[0])


def test_a_line_is_an_event_and_fields() -> None:
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger().info("joined", slot=3, peer=b"\xab" * 32, version=(0, 3), name="box\x1b[2J", why=None)
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "joined",
        "level": "info",
        "slot": 3,
        "peer": peer_id(b"\xab" * 32),
        "version": "(0, 3)",
        "name": "'box\\x1b[2J'",
        "why": None,
    }


def test_a_terminal_gets_no_json() -> None:
    stream = Terminal()
    logs.configure(stream=stream)
    structlog.get_logger().info("joined", slot=3)
    logging.getLogger("library.x").warning("a library's line")
    first, second = stream.getvalue().splitlines()
    assert "Reached the swarm: this machine is member 3." in first
    assert "a library's line" in second
    assert "{" not in stream.getvalue()


def test_lines_elsewhere_are_all_json() -> None:
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger().info("joined", slot=3)
    logging.getLogger("library.x").warning("a library's line")
    EventLog("node.member.worker").warning("no_work", why="copied")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("library.x").exception("a bug", extra={"peer": b"\xcd" * 32})
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["joined", "message", "no_work", "message"]
    assert (lines[1]["source"], lines[1]["text"]) == ("library.x", "a library's line")
    assert lines[2]["why"] == "copied"
    assert "ValueError: broken" in lines[3]["exception"]
    assert lines[3]["peer"] == peer_id(b"\xcd" * 32)


HOSTILE = "\x1b[2J\r\x85\x9b2J\u2028\u202egnp.exe\ud800"


@pytest.mark.parametrize("out", [io.StringIO, Terminal])
def test_what_a_peer_wrote_cannot_move_the_cursor(out: type[io.StringIO], tmp_path: Path) -> None:
    stream = out()
    logs.name_peers(lambda _: HOSTILE)
    logs.configure(stream=stream, file=tmp_path / "log")
    try:
        raise ValueError(f"bad\n  answer: {HOSTILE}")
    except ValueError as error:
        structlog.get_logger().exception("work_lost", sequences=1, why=error, peer=b"\xab" * 32)
        logging.getLogger("library.x").exception(HOSTILE)
    logs.note_end(HOSTILE)
    for text in (stream.getvalue(), (tmp_path / "log").read_text()):
        shown = text.replace("\x1b[31m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")  # our own colours
        assert not [letter for letter in shown if letter != "\n" and not letter.isprintable()]
    assert "\\x1b[2J" in stream.getvalue()
    logged = json.loads((tmp_path / "log").read_text().split("\n")[0])["exception"].split("\n")
    assert logged[0] == "Traceback (most recent call last):"
    assert logged[-1].startswith("  answer: \\x1b[2J\\r\\x85")


def test_a_peer_has_its_name() -> None:
    stream, screen = io.StringIO(), Terminal()
    logs.name_peers(lambda key: {b"\xab" * 32: "box-7"}.get(key, ""))
    for out in (stream, screen):
        logs.configure(stream=out)
        structlog.get_logger().warning("bad_bytes", peer=b"\xab" * 32, detail="a hash")
        structlog.get_logger().warning("bad_bytes", peer=b"\xac" * 32, detail="a hash")
    named, nameless = map(json.loads, stream.getvalue().splitlines())
    assert named["name"] == "box-7"
    assert "name" not in nameless
    first, second = screen.getvalue().splitlines()
    assert "box-7 sent bytes" in first
    assert f"{peer_id(bytes([0xAC]) * 32)[-8:]} sent bytes" in second


def test_a_terminal_shows_what_comes_with_every_version_at_debug_only() -> None:
    for level, shown in (("info", 0), ("debug", 1)):
        stream = Terminal()
        logs.configure(level, stream=stream)
        structlog.get_logger().info("holds", version="0.4")
        assert stream.getvalue().count("Holds version 4.") == shown
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger().info("holds", version="0.4")
    assert json.loads(stream.getvalue())["version"] == "0.4"


def test_a_log_file_gets_json_and_why_the_process_ended(tmp_path: Path) -> None:
    stream = Terminal()
    logs.configure(stream=stream, file=tmp_path / "log")
    structlog.get_logger().info("joined", slot=3)
    logs.note_end("The disk is full.")
    joined, ended = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (joined["event"], joined["slot"]) == ("joined", 3)
    assert (ended["event"], ended["why"]) == ("ended", "The disk is full.")
    assert "The disk is full." not in stream.getvalue()  # the command prints it


def test_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_LOG", "warning")
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("library.x").info("quiet")
    structlog.get_logger().warning("loud")
    logging.getLogger("library.x").warning("loud too")
    assert len(stream.getvalue().splitlines()) == 2
    monkeypatch.setenv("SWARM_LOG", "chatty")
    with pytest.raises(UsageError, match="debug, info"):
        logs.configure()


def test_by_default_stdout_stays_free(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    structlog.get_logger().info("joined")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "joined" in captured.err


def test_lines_of_one_name_are_limited_and_suppressed_ones_counted() -> None:
    now = 100.0
    limit = logs.LineLimit(rate=10.0, burst=20.0, clock=lambda: now)
    assert sum(limit.due("flood") is not None for _ in range(1000)) == 20
    assert limit.due("other") == 0, "another name is not held up"
    now += 0.15
    assert limit.due("flood") == 980
    assert limit.due("flood") is None
    now += 3600.0
    assert limit.due("flood") == 1


def test_many_names_together_are_limited_too() -> None:
    limit = logs.LineLimit(rate=10.0, burst=20.0, clock=lambda: 100.0)
    assert sum(limit.due(f"peer {i}") is not None for i in range(10_000)) == 200
    assert len(limit._names) <= logs.NAMES


def test_bad_messages_of_peers_cannot_fill_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    stream = io.StringIO()
    limit = logs.LineLimit
    monkeypatch.setattr(logs, "LineLimit", lambda: limit(clock=lambda: now))
    logs.configure(stream=stream)
    for i in range(20_000):
        structlog.get_logger().warning("work_dropped", why="x" * 100_000)
        logging.getLogger("node.ledger.service").warning("work message from %s dropped", i)
    assert len(stream.getvalue()) < 3_000_000
    assert len(stream.getvalue().splitlines()) == 1000
    now += 1.0
    structlog.get_logger().warning("work_dropped")
    logging.getLogger("node.ledger.service").warning("another line")
    last = stream.getvalue().splitlines()[-2:]
    assert json.loads(last[0])["suppressed"] == 19_500
    assert json.loads(last[1])["text"] == "another line"
