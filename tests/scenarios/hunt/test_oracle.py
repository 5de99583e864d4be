"""What the oracle checks of boots, leases and drawn tokens."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from codec import FileSpec, Layout, TensorSpec
from node.ledger.messages import Rollout, VersionSpan
from node.ledger.state import AcceptedRollout
from scenarios.hunt.oracle import Oracle

LAYOUT = Layout((TensorSpec("a", "BF16", (8, 8)),), (FileSpec("config.json", 2, bytes(32)),))
NODE, ROOT = b"n" * 32, bytes(32)


def accepted(oracle: Oracle, spans: tuple[VersionSpan, ...]) -> list[str]:
    """The violations when the ledger accepts four tokens with these spans, at the head 0.2 with a lag of 2."""
    tokens, logprobs = np.arange(4, dtype="<u4").tobytes(), np.zeros(4, "<f4").tobytes()
    rollout = Rollout(9, 9, 0, ROOT, tokens, logprobs, "stop", spans)
    lease: Any = SimpleNamespace(id=9, token=9, node=NODE, group=b"g", deadline=5.0)
    ledger: Any = SimpleNamespace(head=SimpleNamespace(name=(0, 2)), groups={b"g": SimpleNamespace(max_lag=2)})
    oracle.accepted(ledger, lease, AcceptedRollout(NODE, 9, 9, rollout.oldest, rollout, b"sealed"), 0, 1.0)
    return [violation.name for violation in oracle.violations]


@pytest.mark.parametrize(
    ("spans", "right"),
    [
        ((VersionSpan(0, 1, ROOT, 3), VersionSpan(0, 2, ROOT, 4)), True),
        ((VersionSpan(0, 1, ROOT, 2), VersionSpan(0, 2, ROOT, 4)), False),
        ((VersionSpan(0, 2, ROOT, 4),), False),
    ],
)
def test_a_rollout_names_the_versions_that_drew_it(spans: tuple[VersionSpan, ...], right: bool) -> None:
    oracle = Oracle(LAYOUT)
    oracle.drew(NODE, range(4), ((0, 1), (0, 1), (0, 1), (0, 2)))
    assert accepted(oracle, spans) == ([] if right else ["no wrong version"])


def test_what_a_liar_names_is_not_checked() -> None:
    oracle = Oracle(LAYOUT, suspects={NODE})
    assert accepted(oracle, (VersionSpan(0, 2, ROOT, 4),)) == []


def test_boot_numbers_rise() -> None:
    oracle = Oracle(LAYOUT)
    oracle.booted(3, "seed")
    oracle.booted(4, "seed")
    assert oracle.violations == []
    oracle.booted(4, "seed")
    assert [violation.name for violation in oracle.violations] == ["no boot number twice"]


@pytest.mark.parametrize(
    ("free", "leased", "done", "right"),
    [({0}, {1: 7}, {2: None}, True), ({0}, {}, {2: None}, False), ({0, 1}, {1: 7}, {2: None}, False)],
)
def test_each_sample_is_in_one_state(free: set[int], leased: dict[int, int], done: dict[int, Any], right: bool) -> None:
    oracle = Oracle(LAYOUT)
    group = SimpleNamespace(id=b"g", n=3, free=free, leased=leased, done=done, dropped=set())
    ledger: Any = SimpleNamespace(groups={b"g": group})
    oracle.check_samples(ledger)
    assert [violation.name for violation in oracle.violations] == ([] if right else ["each sample once"])
