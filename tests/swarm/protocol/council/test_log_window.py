"""The newest entries of a log, in memory."""

import pytest

from codec.errors import PeerError
from swarm.protocol.council import log_window
from swarm.protocol.council.log_window import LogWindow
from swarm.protocol.council.messages import START, Entry, Position


def entries(first: int, count: int, size: int = 1) -> list[Entry]:
    return [Entry(1, index, bytes(size)) for index in range(first, first + count)]


def test_it_gives_what_follows_a_position() -> None:
    window = LogWindow(START)
    window.add(entries(1, 5))
    assert window.last == Position(1, 5)
    assert [entry.index for entry in window.after(Position(1, 3))] == [4, 5]
    assert window.after(Position(1, 5)) == ()
    assert window.has(START)
    assert not window.has(Position(2, 3))
    assert not window.has(Position(1, 6))
    assert window.is_of_term(5, 1)
    assert not window.is_of_term(5, 2)
    assert not window.is_of_term(6, 1)
    with pytest.raises(ValueError, match="window"):
        window.after(Position(9, 9))


def test_a_gap_is_refused() -> None:
    window = LogWindow(Position(3, 7))
    with pytest.raises(PeerError, match="does not follow 7"):
        window.add(entries(9, 1))


def test_it_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_window, "KEPT_ENTRIES", 3)
    window = LogWindow(START)
    window.add(entries(1, 5))
    assert not window.has(Position(1, 1))
    assert [entry.index for entry in window.after(Position(1, 2))] == [3, 4, 5]
    monkeypatch.setattr(log_window, "KEPT_BYTES", 10)
    window.add(entries(6, 2, size=8))
    assert window.last == Position(1, 7)
    assert not window.has(Position(1, 5))
    assert window.has(Position(1, 6))


def test_one_message_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_window, "APPEND_BYTES", 10)
    window = LogWindow(START)
    window.add(entries(1, 4, size=8))
    assert len(window.after(START)) == 1, "one entry always travels, however large"
