"""The terminal's view, a pure function of a status in which any field may be missing."""

import io
from typing import Any

import msgspec
import pytest
import trio
from rich.console import Console

from node.settings.units import size_text
from node.status import terminal
from node.status.schema import (
    MemberStatus,
    NodeStatus,
    OwnStatus,
    QuarantineStatus,
    SavedStateStatus,
    SeedStatus,
    Status,
    Step,
    TimeSplit,
)
from node.status.terminal import Picture

STATUS: dict[str, Any] = {
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
    "steps": [{"version": [0, 3], "density": 0.0101, "bits_per_change": 7.1, "delta_bytes": 12_345,
               "trainer_copies": 1.01, "publish_to_all_s": 0.5, "pause_s": 0.00325}],
}  # fmt: skip
"""A seed's status, as an older or newer release may send it."""


def seed(fields: dict[str, Any]) -> SeedStatus:
    return msgspec.convert({"role": "seed"} | fields, SeedStatus)


def shown(status: Status, **more: Any) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(terminal.view(Picture(status, **more)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_ranks_that_a_node_holds_are_shown() -> None:
    nodes = [{"slot": 0, "name": "a", "held": [0, 3], "shard": "0,1/8"}, {"slot": 1, "name": "b", "held": [0, 3]}]
    lines = shown(seed(STATUS | {"nodes": nodes})).splitlines()
    assert lines[3].split()[:6] == ["0", "a", "v3", "of", "0,1/8", "-"]
    assert lines[4].split()[:4] == ["1", "b", "v3", "-"]


def test_the_view_of_a_seed() -> None:
    text = shown(seed(STATUS), message="node box-b was killed", rewards={(0, 3): 0.4})
    lines = [line.rstrip() for line in text.splitlines()]
    assert (
        lines[0]
        == "swarm kCCsAQQBqGr"[:6] + STATUS["swarm"][-8:] + "   head v3   trainer sent 12.3 MB, of which control 4.3 kB"
    )
    assert lines[3].split() == ["0", "box-a", "v3", "v2", "5", "s", "1.0", "MB", "3.0", "MB", "1,532", "-", "-"]
    assert lines[4].split() == ["1", "box-b", "v2", "-", "1", "s", "0", "B", "0", "B", "0", "-", "-"]
    assert lines[5].split() == ["2", "astchars", "40", "%", "-", "-", "0", "B", "0", "B", "0", "-", "-"]
    assert ["0", "2", "T(0(1(2)))"] in [line.split() for line in lines]
    assert ["1", "T(1(0", "2))"] in [line.split() for line in lines]
    assert ["v3", "-", "1.01", "%", "7.10", "12.3", "kB", "1.010", "0.50", "s", "3.2", "ms", "0.400"] in [
        line.split() for line in lines
    ]
    assert lines[-1] == "node box-b was killed"


def test_the_view_of_a_node() -> None:
    own = OwnStatus(slot=3, name="box", held=(0, 2), sent_bytes=5000, received_bytes=7000)
    status = NodeStatus(head=(0, 2), nodes=[own], message="its news")
    lines = [line.split() for line in shown(status).splitlines()]
    assert ["3", "box", "v2", "-", "-", "5.0", "kB", "7.0", "kB", "-", "-", "-"] in lines, "without an engine"
    assert lines[-1] == ["its", "news"]
    own.engine, own.tokens_s = (0, 1), 1532.4
    lines = [line.split() for line in shown(status, away="It is away.").splitlines()]
    assert ["3", "box", "v2", "v1", "-", "5.0", "kB", "7.0", "kB", "1,532", "-", "-"] in lines
    assert lines[0] == ["It", "is", "away."]


def test_nodes_with_the_same_name_show_their_peer_ids() -> None:
    peers = ["12D3KooWAAAAAAAAAAAAbbbbbbbb", "12D3KooWAAAAAAAAAAAAcccccccc", "12D3KooWAAAAAAAAAAAAdddddddd"]
    nodes = [
        MemberStatus(slot=slot, name=name, peer=peer)
        for slot, (name, peer) in enumerate(zip(["box", "box", "other"], peers, strict=True))
    ]
    lines = shown(SeedStatus(nodes=nodes))
    assert "box bbbbbbbb" in lines
    assert "box cccccccc" in lines
    assert "dddddddd" not in lines


@pytest.mark.parametrize("lacking", [*STATUS, "everything"])
def test_anything_may_be_missing(lacking: str) -> None:
    fields = {} if lacking == "everything" else {key: value for key, value in STATUS.items() if key != lacking}
    assert "head" in shown(seed(fields))


def test_steps_and_nodes_without_any_figures() -> None:
    assert "v1" in shown(SeedStatus(steps=[Step(version=(0, 1))], nodes=[MemberStatus()]))
    assert "v2 (epoch 1)" in shown(SeedStatus(steps=[Step(version=(1, 2))]))


def test_a_big_swarm_fits_a_screen() -> None:
    text = shown(SeedStatus(nodes=[MemberStatus(slot=slot, name=f"n{slot}") for slot in range(1000)]))
    assert "and 960 more" in text
    assert len(text.splitlines()) < 60


def test_text_from_peers_is_not_markup() -> None:
    assert "[bold]evil[/]" in shown(SeedStatus(nodes=[MemberStatus(name="[bold]evil[/]")]))
    assert "?[2Jevil" in shown(SeedStatus(nodes=[MemberStatus(name="\x1b[2Jevil")]))


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ({}, "T"),
        ({3: None, 1: 3, 2: 3, 0: 2}, "T(3(1 2(0)))"),
        ({1: None, 0: 1}, "T(1(0))"),
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
    assert size_text(count) == text


async def test_watch_shows_the_last_status(autojump_clock: trio.testing.MockClock) -> None:
    numbers = iter(range(1000))
    file = io.StringIO()
    with trio.move_on_after(2.1):
        await terminal.watch(
            lambda: Picture(SeedStatus(), message=f"picture {next(numbers)}"),
            console=Console(file=file, width=60, force_terminal=True),
        )
    assert "picture 9" in file.getvalue()


def test_the_view_shows_time_accounting_and_quarantine() -> None:
    good = MemberStatus(slot=0, name="good", tokens_s=1234.0, useful=0.93)
    good.seconds = TimeSplit(generate=93.0, wait_work=4.0, wait_version=1.0, commit=2.0)
    bad = MemberStatus(slot=1, name="bad", tokens_s=99.0)
    bad.quarantine = QuarantineStatus(why="two nodes computed\x1b others")
    step = Step(
        version=(0, 3), extract_s=5.04, first_chunk_s=0.021, publish_to_all_s=12.34,
        stage_s=0.3, pause_s=0.0391, resume_s=0.0,
    )  # fmt: skip
    status = SeedStatus(nodes=[good, bad], steps=[step])
    status.work.useful, status.work.samples_unused = 0.871, 1204
    text = shown(status)
    assert "useful 87 % of the nodes' time, 1,204 samples generated and never used" in " ".join(text.split())
    assert ["good", "93.0%", "4.0%", "1.0%", "2.0%"] in [line.split() for line in text.splitlines()]
    for found in ("1,234", "93%", "5.04 s", "21.0 ms", "12.3 s", "0.30 s", "39.1 ms", "0.0 ms", "quarantine"):
        assert found in text, found
    assert "bad is in quarantine: two nodes computed? others" in text


def test_saved_states_are_shown_with_what_is_missing() -> None:
    assert "saved state" not in shown(SeedStatus())
    last = SavedStateStatus(
        step=90, size_bytes=8 * 10**8, age_s=7300, whole=True, fragments=12, needed=6, held=11, nodes=10
    )
    text = shown(SeedStatus(saved_states=[last, SavedStateStatus(step=95, age_s=30, fragments=12, needed=6)]))
    assert "saved state of step 90: 800 MB, 2.0 h old, 11 of 12 fragments at 10 nodes, 6 are enough\n" in text
    assert "saved state of step 95: 0 B, 30.0 s old, 0 of 12 fragments at 0 nodes, 6 are enough, on its way\n" in text


def test_experts_are_shown_where_a_model_has_some() -> None:
    plain = Step(version=(0, 1))
    assert "experts" not in shown(SeedStatus(steps=[plain]))
    mixture = [plain, Step(version=(0, 2), experts=6144, experts_touched=0), Step(version=(0, 3), experts=6144)]
    mixture[2].experts_touched = 1031
    text = shown(SeedStatus(steps=mixture))
    assert "experts changed, of 6,144: v2 0   v3 1,031\n" in text
