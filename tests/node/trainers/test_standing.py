"""`Swarm.state`, computed from the seed's status."""

import pytest

from node.status.schema import EgressStatus, LedgerStatus, MemberStatus, SeedReport, SeedStatus, Step, Version, to_plain
from node.trainers.standing import standing


def step(
    version: int, age_s: float, to_all_s: float | None, delta_bytes: int = 1000, *, name: Version | None = None
) -> Step:
    return Step(
        version=name or (0, version),
        age_s=age_s,
        publish_to_all_s=to_all_s,
        delta_bytes=delta_bytes,
        trainer_sent_bytes=delta_bytes + 50,
        held=1,
        waiting=1,
    )


def report(steps: list[Step], nodes: list[MemberStatus] | None = None) -> SeedReport:
    swarm = SeedStatus(head=(0, len(steps)), root="ab", sent_bytes=9, steps=steps, nodes=nodes or [])
    return SeedReport(swarm=swarm, work=LedgerStatus(tokens_per_s=12.5, refused={"too_old": 3}))


def test_lag_is_in_versions_and_seconds() -> None:
    steps = [step(1, 30.0, 2.0), step(2, 20.0, None), step(3, 10.0, None)]
    nodes = [MemberStatus(held=(0, 3)), MemberStatus(held=(0, 1), name="slow"), MemberStatus()]
    fresh, slow, new = standing(report(steps, nodes))["nodes"]
    assert (fresh["lag_versions"], fresh["lag_s"]) == (0, 0.0)
    assert (slow["lag_versions"], slow["lag_s"], slow["name"]) == (2, 20.0, "slow")
    assert (new["lag_versions"], new["lag_s"], new["version"]) == (3, 30.0, None)


def test_a_node_of_an_epoch_that_is_over_lags() -> None:
    steps = [step(7, 30.0, 1.0), step(3, 5.0, None, name=(1, 3))]
    (node,) = standing(report(steps, [MemberStatus(held=(0, 7))]))["nodes"]
    assert (node["lag_versions"], node["lag_s"]) == (1, 5.0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], None),
        ([step(1, 3.0, None)], None),
        ([step(1, 9.0, 2.0), step(2, 3.0, 1.0)], 0.0),
        ([step(1, 9.0, 2.0), step(2, 0.5, None)], 1.5),
        ([step(1, 9.0, 2.0), step(2, 0.5, None, delta_bytes=3000)], 5.5),
        ([step(1, 9.0, 2.0), step(2, 50.0, None)], 0.0),
    ],
)
def test_expected_arrival_follows_from_the_last_versions(steps: list[Step], expected: float | None) -> None:
    assert standing(report(steps))["expected_arrival_s"] == expected


def test_the_other_fields() -> None:
    found = standing(report([step(1, 3.0, None)]))
    assert found["sealed"] == {"version": (0, 1), "root": "ab", "age_s": 3.0, "held": 1, "waiting": 1}
    budget = {"step_bytes": 1050, "budget_bytes": 1030 + (64 << 10), "payload": to_plain(EgressStatus())}
    assert found["egress"] == {"sent_bytes": 9} | budget
    assert (found["tokens_s"], found["refused"]) == (12.5, {"too_old": 3})
    assert standing(report([]))["egress"]["budget_bytes"] == 0
