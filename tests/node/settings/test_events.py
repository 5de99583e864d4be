"""Every event of the log has a sentence and a row in the docs, and the sentences read well."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import swarm.protocol.core.notices as notices
from node.settings.events import EVENTS, say

HOUSE = Path(__file__).parents[3]
OF_ANOTHER_LOG = (
    *(f"node/engines/vllm/{name}.py" for name in ("adapters", "attached", "engine", "measured")),
    "node/engines/vllm/plugin/",
)
"""Run in the engine's process, whose output is in engine.log."""
NOT_LOGGED = {"work"}
"""A notice that comes with each message of a node."""


def logged(path: Path) -> Iterator[str]:
    """The event names that a module logs: the first argument of `_log.info("name", field=...)`."""
    source = path.read_text()
    if "structlog.get_logger" not in source and "EventLog(" not in source:
        return
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
            continue
        first = call.args[0]
        if call.func.attr in ("debug", "info", "warning", "error") and isinstance(first, ast.Constant):
            yield str(first.value)


def of_the_code() -> set[str]:
    found = {notice.log_name for notice in notices.Notice.__subclasses__()} - NOT_LOGGED
    for room in ("node", "swarm"):
        for path in (HOUSE / room).rglob("*.py"):
            if not str(path.relative_to(HOUSE)).startswith(OF_ANOTHER_LOG):
                found |= set(logged(path))
    milestones = (HOUSE / "node" / "member" / "milestones.py").read_text()
    return found | set(re.findall(r'\(\(?\[?\(?"(\w+)", ', milestones)) | {"message", "ended"}


def test_every_event_of_the_code_has_a_sentence_and_no_sentence_is_left_over() -> None:
    assert of_the_code() == set(EVENTS)


def test_the_docs_have_every_event_with_what_to_do() -> None:
    section = (HOUSE / "docs" / "operations.md").read_text().split("## The log")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", section, re.M)

    def shown(says: str) -> str:
        return re.sub(r"\{(\w+)(?::\w+)?\}", lambda field: field[1].upper(), says.replace("[[", "").replace("]]", ""))

    assert rows == [(name, shown(event.says), event.todo) for name, event in EVENTS.items()]


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("sealed", {"version": "0.4", "density": 0.0123, "delta_bytes": 3_920_000},
         "Version 4 is sealed: 1.2 % of the elements changed, 3.9 MB."),
        ("sealed", {"version": "2.4", "step": 17, "density": 0.01, "delta_bytes": 10},
         "Version 4 (epoch 2) (step 17) is sealed: 1 % of the elements changed, 10 B."),
        ("fetching", {"percent": 25, "bytes": 4e9, "of_bytes": 16e9, "bytes_s": 110e6, "left_s": 109.0},
         "Fetching the model: 4.0 GB of 16.0 GB, 25 %, 110 MB/s, 2 min left."),
        ("fetching", {"percent": 0, "bytes_s": 0}, "Fetching the model: 0 %, 0 B/s."),
        ("member_left", {"who": "box-7", "why": "it was stopped", "members": 3},
         "box-7 left: it was stopped (members: 3)."),
        ("starting", {"addrs": "/ip4/203.0.113.7/tcp/4001, /ip6/2001:db8::1/tcp/4001"},
         "Looking for the swarm from 203.0.113.7:4001, [2001:db8::1]:4001."),
        ("unreachable", {"why": None}, "The seed does not answer. Trying again."),
        ("nothing_that_exists", {"a": 1}, "nothing_that_exists a=1"),
    ],
)  # fmt: skip
def test_a_sentence(name: str, fields: dict[str, object], says: str) -> None:
    assert say(name, fields) == says
