"""Log lines go to stderr, as JSON where no person watches."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from codec.errors import UsageError
from node import logs


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


def test_people_get_no_json() -> None:
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
