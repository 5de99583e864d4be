"""The view: a pure function of a dict that may lack anything."""

import io
from typing import Any

import pytest
import trio
from rich.console import Console

from node.status import terminal

STATE: dict[str, Any] = {
    "swarm": "12D3KooWJcZXQedKnSa2yNGns3yFjca4ZPbCkD8YekCCsAQQBqGr",
    "head": [0, 3],
    "sent_bytes": 12_345_678,
    "control_bytes": 4321,
    "nodes": [
        {"slot": 1, "name": "box-b", "held": [0, 2], "engine": None, "standing": "soft", "lease_s": 1.4},
        {"slot": 0, "name": "box-a", "held": [0, 3], "engine": [0, 2], "standing": "fresh", "lease_s": 5.2,
         "sent_bytes": 1_000_000, "received_bytes": 3_000_000, "tokens_s": 1532.0},
        {"slot": 2, "peer": "12D3KooWAAAAAAAAlastchars", "held": [0, 0], "catching_up": 0.4},
    ],
    "stripes": [{0: None, 1: 0, 2: 1}, {0: 1, 1: None, 2: 1}, {0: None, 1: 0, 2: 1}],
    "steps": [{"version": 3, "density": 0.0101, "bits_per_change": 7.1, "delta_bytes": 12_345, "trainer_copies": 1.01,
               "publish_to_all_s": 0.5, "commit_pause_ms": 3.25, "reward": 0.4}],
    "message": "node box-b was killed",
}  # fmt: skip


def shown(state: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(terminal.view(state))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_a_person_sees() -> None:
    lines = [line.rstrip() for line in shown(STATE).splitlines()]
    assert (
        lines[0]
        == "swarm kCCsAQQBqGr"[:6] + STATE["swarm"][-8:] + "   head v3   trainer sent 12.3 MB, of which control 4.3 kB"
    )
    assert lines[3].split() == ["0", "box-a", "v3", "v2", "5", "s", "1.0", "MB", "3.0", "MB", "1,532", "-", "-"]
    assert lines[4].split() == ["1", "box-b", "v2", "-", "1", "s", "-", "-", "-", "-", "-"]
    assert lines[5].split() == ["2", "astchars", "40", "%", "-", "-", "-", "-", "-", "-", "-"]
    assert ["0", "2", "T(0(1(2)))"] in [line.split() for line in lines]
    assert ["1", "T(1(0", "2))"] in [line.split() for line in lines]
    assert ["v3", "1.01", "%", "7.10", "12.3", "kB", "1.010", "0.50", "s", "3.2", "ms", "0.400"] in [
        line.split() for line in lines
    ]
    assert lines[-1] == "node box-b was killed"


def test_nodes_of_one_name_are_told_apart() -> None:
    peers = ["12D3KooWAAAAAAAAAAAAbbbbbbbb", "12D3KooWAAAAAAAAAAAAcccccccc", "12D3KooWAAAAAAAAAAAAdddddddd"]
    nodes = [
        {"slot": slot, "name": name, "peer": peer}
        for slot, (name, peer) in enumerate(zip(["box", "box", "other"], peers, strict=True))
    ]
    lines = shown({"nodes": nodes})
    assert "box bbbbbbbb" in lines
    assert "box cccccccc" in lines
    assert "dddddddd" not in lines


@pytest.mark.parametrize("lacking", [*STATE, "everything"])
def test_anything_may_be_missing(lacking: str) -> None:
    state = {} if lacking == "everything" else {key: value for key, value in STATE.items() if key != lacking}
    assert "head" in shown(state)


def test_steps_and_nodes_that_only_just_began() -> None:
    assert "v1" in shown({"steps": [{"version": 1}], "nodes": [{"slot": 0}]})
    assert "v2 (epoch 1)" in shown({"steps": [{"version": [1, 2]}]})


def test_a_big_swarm_fits_a_screen() -> None:
    text = shown({"nodes": [{"slot": slot, "name": f"n{slot}"} for slot in range(1000)]})
    assert "and 960 more" in text
    assert len(text.splitlines()) < 60


def test_text_from_peers_is_not_markup() -> None:
    assert "[bold]evil[/]" in shown({"nodes": [{"slot": 0, "name": "[bold]evil[/]"}]})
    assert "?[2Jevil" in shown({"nodes": [{"slot": 0, "name": "\x1b[2Jevil"}]})


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ({}, "T"),
        ({3: None, 1: 3, 2: 3, 0: 2}, "T(3(1 2(0)))"),
        ({"1": None, "0": 1}, "T(1(0))"),
        ({0: 1, 1: 0, 2: None}, "T(2) ? 0 1"),
        ({0: 9}, "T ? 0"),
    ],
)
def test_trees(parents: dict, text: str) -> None:
    assert terminal.tree(parents) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_940, "99.9 kB"), (99_960, "100 kB"), (999_600, "1.0 MB"),
     (3.2e9, "3.2 GB"), (5e15, "5000.0 TB"), (None, "-")],
)  # fmt: skip
def test_sizes(count: float | None, text: str) -> None:
    assert terminal.size(count) == text


async def test_watch_shows_the_last_state(autojump_clock: trio.testing.MockClock) -> None:
    states = iter(range(1000))
    file = io.StringIO()
    with trio.move_on_after(2.1):
        await terminal.watch(
            lambda: {"message": f"picture {next(states)}"}, console=Console(file=file, width=60, force_terminal=True)
        )
    assert "picture 9" in file.getvalue()


def test_where_the_time_goes_and_who_is_aside() -> None:
    nodes = [
        {"slot": 0, "name": "good", "tokens_s": 1234.0, "useful": 0.93,
         "seconds": {"generate": 93.0, "wait_work": 4.0, "wait_version": 1.0, "commit": 2.0}},
        {
            "slot": 1,
            "name": "bad",
            "tokens_s": 99.0,
            "quarantine": {"why": "two nodes computed\x1b others", "left_s": None},
        },
    ]  # fmt: skip
    step = {"version": [0, 3], "extract_s": 5.04, "first_chunk_s": 0.021, "publish_to_all_s": 12.34,
            "stage_s": 0.3, "pause_s": 0.0391, "resume_s": 0.0}  # fmt: skip
    text = shown({"nodes": nodes, "steps": [step], "work": {"useful": 0.871, "samples_unused": 1204}})
    assert "useful 87 % of the nodes' time, 1,204 samples drawn and never used" in text
    assert ["good", "93.0%", "4.0%", "1.0%", "2.0%"] in [line.split() for line in text.splitlines()]
    for found in ("1,234", "93%", "5.04 s", "21.0 ms", "12.3 s", "0.30 s", "39.1 ms", "0.0 ms", "aside"):
        assert found in text, found
    assert "bad is in quarantine: two nodes computed? others" in text
