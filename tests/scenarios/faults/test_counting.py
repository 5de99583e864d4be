"""What counts rollouts: each once, as the trainer was handed them and as the seed's book has them."""

import json
import sqlite3
from pathlib import Path

import pytest
from msgspec import msgpack

from node.ledger.messages import Reason
from node.trainers.rollouts import group_id
from scenarios.faults.counting import Counting, Miscounted
from scenarios.faults.trainer import GROUPS, lines_of, session_of


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    with sqlite3.connect(tmp_path / "ledger.sqlite") as book:
        book.execute("create table rollouts (grp blob, sample integer, sealed blob)")
        book.execute("create table requeues (lease integer, grp blob, samples blob, why text)")
    return Counting(tmp_path / "journal", tmp_path)


def write(counting: Counting, *lines: dict) -> None:
    with counting._journal.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def execute(counting: Counting, statement: str, *values: object) -> None:
    with sqlite3.connect(counting._book) as book:
        book.execute(statement, values)


def group(index: int, *samples: list[int], number: int = 0) -> dict:
    return {"round": number, "index": index, "samples": list(samples), "at": 5.0}


def test_a_group_that_comes_again_is_counted_once(counting: Counting) -> None:
    write(counting, group(0, [1], [2]), group(0, [1], [2]), group(1, [3], [4]))
    counting.read()
    assert (counting.groups, counting.samples, counting.last_at) == (2, 4, 5.0)
    write(counting, group(0, [1], [9]))
    with pytest.raises(Miscounted, match="group 0 of round 0 was handed over again with other samples"):
        counting.read()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (group(1, [5], [2]), "a sample of group 1 of round 0 is one of group 0 of round 0 as well"),
        (group(1, [5], [5]), "is one of group 1 of round 0 as well"),
        (group(1, [5]), "group 1 of round 0 has 1 samples of 2"),
        ({"ended": 0}, r"round 0 ended without the groups \[1, 2, 3\]"),
    ],
)
def test_what_is_counted_twice_or_lost_is_seen(counting: Counting, line: dict, why: str) -> None:
    write(counting, group(0, [1], [2]), line)
    with pytest.raises(Miscounted, match=why):
        counting.read()


def test_a_whole_round_may_end(counting: Counting) -> None:
    write(counting, *(group(index, [2 * index], [2 * index + 1]) for index in range(GROUPS)), {"ended": 0})
    counting.read()
    assert counting.groups == GROUPS


def test_an_accepted_rollout_stays_in_the_book_or_goes_to_the_trainer(counting: Counting) -> None:
    name = group_id(session_of(0), 0)
    execute(counting, "insert into rollouts values (?, 0, x'01')", name)
    assert counting.compare_book() == 1
    assert counting.compare_book() == 1
    execute(counting, "delete from rollouts")
    with pytest.raises(Miscounted, match=f"the seed's book lost sample 0 of group {name.hex()}"):
        counting.compare_book()
    write(counting, group(0, [1], [2]))
    counting.read()
    assert counting.compare_book() == 0


def test_a_rollout_is_replaced_only_after_the_ledger_discarded_it(counting: Counting) -> None:
    execute(counting, "insert into rollouts values (x'aa', 0, x'01')")
    counting.compare_book()
    execute(counting, "update rollouts set sealed = x'02'")
    with pytest.raises(Miscounted, match="the seed's book replaced sample 0 of group aa"):
        counting.compare_book()
    samples = msgpack.encode((0,))
    execute(counting, "insert into requeues values (null, x'aa', ?, ?)", samples, Reason.LIED.value)
    with pytest.raises(Miscounted, match="replaced"):
        counting.compare_book()
    execute(counting, "insert into requeues values (null, x'aa', ?, ?)", samples, Reason.WRONG_REWARD.value)
    assert counting.compare_book() == 1
    assert counting.discarded == 1


def test_what_was_handed_over_may_become_too_old_in_the_book_of_a_seed_that_was_killed(counting: Counting) -> None:
    name, samples = group_id(session_of(0), 0), msgpack.encode((0,))
    execute(counting, "insert into rollouts values (?, 0, x'01')", name)
    counting.compare_book()
    execute(counting, "update rollouts set sealed = x'02'")
    execute(counting, "insert into requeues values (null, ?, ?, ?)", name, samples, Reason.TOO_OLD.value)
    with pytest.raises(Miscounted, match="replaced"):
        counting.compare_book()
    write(counting, group(0, [1], [2]))
    counting.read()
    assert counting.compare_book() == 1
    assert counting.discarded == 0


def test_half_a_line_of_the_journal_is_read_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text('{"ended": 0}\n{"ended"')
    lines, at = lines_of(tmp_path / "journal")
    assert lines == [{"ended": 0}]
    (tmp_path / "journal").write_text('{"ended": 0}\n{"ended": 1}\n')
    assert lines_of(tmp_path / "journal", at)[0] == [{"ended": 1}]
