"""The benchmark of tasks runs both managers."""

from scenarios.bench.tasks import measure


def test_there_is_a_row_for_each_number_of_tasks() -> None:
    rows = measure([40, 10])
    assert [row["tasks"] for row in rows] == [10, 40]
    assert all(row["library_us"] > 0 and row["ours_us"] > 0 for row in rows)
