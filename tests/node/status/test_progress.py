"""The progress line: silent at first, one line on a terminal, lines at growing intervals elsewhere."""

import io

import pytest

from node.status.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silent_for_two_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = ProgressLine("Reading", stream=stream, clock=clock)
    clock.now += 1.9
    progress.tick()
    assert stream.getvalue() == ""


def test_lines_grow_rarer_in_a_log() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = ProgressLine("Reading", total=4000, unit="blocks", stream=stream, clock=clock)
    for second in range(1, 101):
        clock.now = 100.0 + second
        progress.update(second * 40)
        progress.tick()
    seconds = [int(line.rpartition(", ")[2].removesuffix(" s")) for line in stream.getvalue().splitlines()]
    assert seconds == [2, 4, 8, 16, 32, 62, 92]
    assert stream.getvalue().splitlines()[0] == "Reading: 80 of 4,000 blocks (2 %), 2 s"


def test_a_terminal_has_one_line_that_is_wiped() -> None:
    clock, stream = Clock(), Terminal()
    with ProgressLine("Reading", stream=stream, clock=clock) as progress:
        clock.now += 3
        progress.tick()
        progress.tick()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_a_terminal_without_output_is_not_wiped() -> None:
    stream = Terminal()
    with ProgressLine("Quick", stream=stream, clock=Clock()):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("total", "done", "line"),
    [
        (None, 0, "Reading: 3 s"),
        (None, 1234, "Reading: 1,234 blocks, 3 s"),
        (10, 20, "Reading: 20 of 10 blocks (100 %), 3 s"),
    ],
)
def test_the_text_of_a_line(total: int | None, done: int, line: str) -> None:
    progress = ProgressLine("Reading", total=total, unit="blocks", stream=io.StringIO(), clock=Clock())
    progress.update(done)
    assert progress.line(3.2) == line
