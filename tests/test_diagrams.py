"""The diagrams in `docs/protocol.md` show the transition tables of the code."""

from enum import Enum

import pytest

from tools.diagrams import DIAGRAMS, PAGE, diagram, fill


def test_the_page_is_current() -> None:
    page = PAGE.read_text()
    assert fill(page) == page, "run python -m tools.diagrams"
    for name in DIAGRAMS:
        assert page.count(f"<!-- diagram {name} -->") == 1


@pytest.mark.parametrize("name", sorted(DIAGRAMS))
def test_a_table_has_every_state_and_uses_every_cause(name: str) -> None:
    table = DIAGRAMS[name]
    states, causes = type(next(iter(table))), {cause for row in table.values() for cause in row}
    assert set(table) == set(states)
    assert causes == set(type(next(iter(causes))))
    reached = {after for row in table.values() for after in row.values()}
    assert reached == set(states), "every state is reached from another"


def test_a_cause_that_leads_to_one_state_from_everywhere_is_drawn_once() -> None:
    class Light(Enum):
        RED = "red"
        GREEN = "green"

    class Cause(Enum):
        GO = "go"
        FAILED = "failed"

    table = {Light.RED: {Cause.FAILED: Light.RED, Cause.GO: Light.GREEN}, Light.GREEN: {Cause.FAILED: Light.RED}}
    assert diagram(table).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> red",
        "    any --> red: failed",
        "    red --> green: go",
    ]


def test_a_diagram_that_there_is_no_table_for() -> None:
    with pytest.raises(KeyError):
        fill("<!-- diagram weather -->\n<!-- end diagram -->")
