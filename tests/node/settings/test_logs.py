"""Log lines go to stderr, as JSON when it is no terminal."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from codec.errors import UsageError
from node.settings import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    structlog.reset_defaults()
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
        "peer": "abababab",
        "version": "(0, 3)",
        "name": "'box\\x1b[2J'",
        "why": None,
    }


def test_a_terminal_gets_no_json() -> None:
    stream = Terminal()
    logs.configure(stream=stream)
    structlog.get_logger().info("joined", slot=3)
    assert "joined" in stream.getvalue()
    assert "{" not in stream.getvalue()


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
    assert last[1] == "node.ledger.service: another line"
