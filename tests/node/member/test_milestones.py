"""What a node tells from its start to its work, and how seldom."""

from typing import Any

from node.member.milestones import Look, Milestones

LOOK = Look(
    held=None, head=None, fetched=None, of_bytes=None, received_bytes=0, pushed_bytes=0, doing="generating with {}"
)


class Teller:
    """Looks once a second, as the node does."""

    def __init__(self) -> None:
        self.now = 100.0
        self._milestones = Milestones(self.now)

    def told(self, look: Look, seconds: int) -> list[tuple[float, str, dict[str, Any]]]:
        """(seconds since the begin of this call, event, fields) of each line."""
        began, lines = self.now, []
        for _ in range(seconds):
            lines += [(self.now - began, *line) for line in self._milestones.lines(look, self.now)]
            self.now += 1.0
        return lines


def test_a_fetch_says_bytes_rate_and_time_left() -> None:
    teller = Teller()
    assert teller.told(LOOK, 10) == []
    assert teller.told(LOOK._replace(fetched=0.0), 5) == []
    half = LOOK._replace(fetched=0.5, of_bytes=1000, received_bytes=600)
    told = teller.told(half, 10)
    assert [at for at, _, _ in told] == [0.0, 5.0]
    assert told[0][1:] == (
        "fetching",
        {"percent": 50, "bytes": 500, "of_bytes": 1000, "bytes_s": 120, "left_s": 5.0},
    )
    assert told[1][2]["bytes_s"] == 0, "nothing came since the line before"
    assert [name for _, name, _ in teller.told(LOOK._replace(held=(0, 3)), 1)] == ["ready"]


def test_a_starting_engine_says_every_ten_seconds_what_it_waits_for() -> None:
    teller = Teller()
    starting = LOOK._replace(held=(0, 3), waits_for="its process to start", log_says="INFO loading")
    told = teller.told(starting, 25)
    assert [(at, name, fields["seconds"]) for at, name, fields in told] == [
        (0.0, "engine_starting", 0.0), (10.0, "engine_starting", 10.0), (20.0, "engine_starting", 20.0),
    ]  # fmt: skip
    assert told[0][2]["waits_for"] == "its process to start"
    assert told[0][2]["log_says"] == "INFO loading"
    (line,) = teller.told(starting._replace(waits_for="", engine=(0, 2)), 1)
    assert line[1:] == ("ready", {"doing": "generating with version 2", "version": "0.2", "seconds": 25.0})


def test_a_ready_node_says_one_line_a_minute() -> None:
    teller = Teller()
    ready = LOOK._replace(held=(0, 3), head=(0, 4), waits_for="", engine=(0, 3), accepted=7, refused=1, tokens_s=81.4)
    lines = []
    for second in range(600):
        lines += teller.told(ready._replace(pushed_bytes=10 * second, engine=(0, second)), 1)
    assert [name for _, name, _ in lines] == ["ready"] + ["working"] * 9
    assert lines[1][2] == {
        "version": "0.60", "head": "0.4", "tokens_s": 81, "accepted": 7, "refused": 1, "passed_on_bytes": 600,
    }  # fmt: skip


def test_an_engine_that_comes_back_is_ready_again() -> None:
    teller = Teller()
    ready = LOOK._replace(held=(0, 3), waits_for="", engine=(0, 3))
    teller.told(ready, 5)
    assert [name for _, name, _ in teller.told(ready._replace(waits_for="its weights to be loaded"), 5)] == [
        "engine_starting"
    ]
    (line,) = teller.told(ready, 30)
    assert (line[1], "seconds" in line[2]) == ("ready", False)


def test_a_node_without_an_engine_is_ready_with_its_replica() -> None:
    (line,) = Teller().told(LOOK._replace(held=(2, 3), doing="holding {}"), 30)
    assert line[2]["doing"] == "holding version 3 (epoch 2)"
