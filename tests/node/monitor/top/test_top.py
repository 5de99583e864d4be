"""The picture of `swarm-node top`: compared with kept screens, and drawn at any size from any status.

UPDATE_SCREENS=1 writes the kept screens anew: look at them before they are committed.
"""

import io
import os
from pathlib import Path

import pytest
from rich.text import Text

from node.monitor.findings import findings, headline
from node.monitor.monitor import Seen
from node.monitor.top.draw import Picture, draw
from node.monitor.top.live import Screen
from node.monitor.top.panels import trees
from node.status.keys import split_keys
from node.status.schema import MemberStatus, NodeStatus, OwnStatus, PieceMap, RelayStatus, SeedStatus, Status, TimeSplit
from node.status.work_schema import WorkerStatus
from scenarios.harness.made_up_swarm import made_up_status

SCREENS = Path(__file__).parent / "screens"


def picture(status: Status | None, columns: int, rows: int, *, away: str = "", scroll: int = 0) -> Picture:
    said, found = ("", []) if status is None else (headline(status), findings(status))
    rates = [900.0, 1000.0, 1200.0, 1100.0, 1300.0] * 4
    return Picture(Seen(0.0, said, found, status, away), columns, rows, "12:34:56", rates, scroll)


def plain(lines: list[Text]) -> str:
    return "".join(line.plain.rstrip() + "\n" for line in lines)


def node() -> NodeStatus:
    own = OwnStatus(
        slot=3, name="box-7", held=(0, 20), sent_bytes=3_000_000, pushed_bytes=2_500_000, received_bytes=5_000_000,
        engine=(0, 20), standing="fresh",
    )  # fmt: skip
    own.work = WorkerStatus(tokens_per_s=812.0, generating=12, accepted=310, refused={"late": 2})
    own.work.seconds = TimeSplit(generate=93.0, wait_work=7.0)
    pieces = PieceMap(
        version=(0, 21), sealed=True, chunks=8, have=[1, 1, 1, 0.5, 0, 0, 0, 0], giver=[-1, 5, 5, 5] + [-2] * 4
    )
    return NodeStatus(head=(0, 21), nodes=[own], pieces=pieces, seed_reached="direct", stripes=[{3: None, 5: 3}])


@pytest.mark.parametrize(
    ("name", "status", "columns", "rows"),
    [
        ("seed-80", made_up_status(12, 407.0), 80, 32),
        ("seed-200", made_up_status(64, 407.0), 200, 50),
        ("node-80", node(), 80, 24),
        ("empty-80", SeedStatus(head=(0, 0)), 80, 24),
    ],
)
def test_a_screen_is_as_it_was(name: str, status: Status, columns: int, rows: int) -> None:
    text = plain(draw(picture(status, columns, rows)))
    kept = SCREENS / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        kept.write_text(text)
    assert text == kept.read_text()


@pytest.mark.parametrize("nodes", [0, 1, 12, 200])
def test_every_size_is_filled_exactly(nodes: int) -> None:
    statuses = [made_up_status(nodes, 407.0) if nodes else SeedStatus(), node(), RelayStatus(), None]
    for status in statuses:
        for columns in (1, 39, 40, 80, 119, 120, 200, 400):
            for rows in (1, 9, 10, 24, 50, 100):
                lines = draw(picture(status, columns, rows))
                assert len(lines) == rows
                assert {line.cell_len for line in lines} == {columns}


def test_the_legend_and_what_is_wrong_are_on_every_screen() -> None:
    for columns, rows in ((80, 24), (200, 50)):
        text = plain(draw(picture(made_up_status(64, 407.0), columns, rows)))
        assert "q: end" in text
        assert "holds the newest version" in text
        assert "rtx4090-05 is reached through a relay only" in text


def test_a_process_that_does_not_answer_is_named() -> None:
    text = plain(draw(picture(made_up_status(2, 407.0), 80, 24, away="No swarm process answers in /home/x")))
    assert "It does not answer now; this was its state before." in text
    assert "h100-00" in text, "the last state stays"


def test_members_can_be_scrolled_to_the_last_one() -> None:
    status = made_up_status(64, 407.0)
    first, last = (plain(draw(picture(status, 80, 24, scroll=scroll))) for scroll in (0, 10_000))
    assert "h100-00" in first
    assert "63  " in last
    assert "of 64" in last


def test_names_of_peers_cannot_move_the_cursor() -> None:
    status = SeedStatus(head=(0, 1), nodes=[MemberStatus(name="\x1b[2J[bold]evil", held=(0, 1))])
    text = plain(draw(picture(status, 80, 24)))
    assert "?[2J[bold]evil" in text
    assert "\x1b" not in text


def test_a_tree_that_is_a_circle_ends() -> None:
    status = SeedStatus(stripes=[{0: 1, 1: 0, 2: None}], nodes=[MemberStatus(slot=slot) for slot in range(3)])
    assert "in no tree" in plain(trees(status, 80, 20, 0))


def test_only_lines_that_differ_are_written() -> None:
    out = io.StringIO()
    screen = Screen(out)
    lines = [Text("one"), Text("two", "green")]
    screen.show(lines, anew=True)
    assert "\x1b[2J" in out.getvalue()
    size = len(out.getvalue())
    screen.show(lines)
    assert len(out.getvalue()) == size, "nothing has changed"
    screen.show([lines[0], Text("three")])
    written = out.getvalue()[size:]
    assert "three" in written
    assert "one" not in written
    assert "\x1b[2J" not in written


def test_keys_are_split() -> None:
    assert split_keys("q\x1b[Aj\x1bOB\x1b[6~\x1b[15~é") == ["q", "up", "j", "down", "page down", "é"]
