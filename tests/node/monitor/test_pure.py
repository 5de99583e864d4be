"""What the monitor derives from a status: metrics, sentences, readiness, histograms, history."""

import json
import random
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from node.monitor.findings import MOST, findings, headline
from node.monitor.health import BEHIND_S, Readiness
from node.monitor.history import KEPT_S, MOST_BYTES, History, Point
from node.monitor.metrics import exposition
from node.monitor.observations import Histogram, Observations
from node.status.schema import (
    EngineCommit,
    EngineStatus,
    LedgerStatus,
    MemberStatus,
    NodeStatus,
    OwnStatus,
    QuarantineStatus,
    RelayStatus,
    SavedStateStatus,
    SeedStatus,
    Status,
    Step,
    TimeSplit,
    WorkerStatus,
)
from scenarios.harness.made_up_swarm import made_up_status

WORKER = WorkerStatus(accepted=5, refused={"version too old": 2}, seconds=TimeSplit(generate=9.0))
NODE = NodeStatus(
    head=(0, 5),
    nodes=[OwnStatus(slot=3, standing="fresh", held=(0, 4), engine=(0, 4), tokens_s=7.5, engine_restarts=1,
                     engine_reloads=0, commits=[EngineCommit(version=(0, 4), pause_ms=30)], work=WORKER, asleep=False,
                     engines=[EngineStatus(state="ready", version=(0, 4), sequences=6, devices=["0", "1"]),
                              EngineStatus(state="given up", restarts=3, why="No kernel.")])],
)  # fmt: skip
EVERY_KIND = [
    made_up_status(40, 700.0),
    NODE,
    RelayStatus(nodes=[OwnStatus(slot=2)], circuits=4),
    SeedStatus(),
    NodeStatus(),
]


def test_the_last_whole_saved_state_has_metrics_and_a_finding_when_fragments_are_missing() -> None:
    whole = SavedStateStatus(step=90, age_s=12.5, whole=True, fragments=12, needed=6, held=12, nodes=12)
    coming = SavedStateStatus(step=95, age_s=1.0, fragments=12, needed=6, held=3, nodes=3)
    status = SeedStatus(saved_states=[whole, coming])
    found = scraped(status)
    assert found["swarm_saved_state_age_seconds"] == 12.5
    assert found["swarm_saved_state_fragments{which=held}"] == 12
    assert found["swarm_saved_state_fragments{which=needed}"] == 6
    assert not any("saved state" in each.what for each in findings(status))
    whole.held = 11
    (finding,) = [each for each in findings(status) if "saved state" in each.what]
    assert finding.what.startswith("11 of 12 fragments of the saved state of step 90")


def scraped(status: Status) -> dict[str, float]:
    """The samples of a scrape by name and labels, as a Prometheus that reads OpenMetrics strictly sees them."""
    seen = Observations()
    seen.look(status)
    text = exposition(status, seen, "0.1.0")[0].decode()
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("status", EVERY_KIND)
def test_metrics_are_valid_and_named_by_the_conventions(status: Status):
    found = scraped(status)
    assert found
    for name in found:
        assert re.match(r"swarm_[a-z_]+", name)
        assert not re.search(r"12D3|peer=", name)


def test_metrics_of_a_seed():
    status = made_up_status(40, 700.0)
    found = scraped(status)
    assert found["swarm_head_version"] == status.head[1]  # pyright: ignore[reportOptionalSubscript]
    assert found["swarm_members{standing=fresh}"] == 39
    assert found["swarm_members{standing=soft}"] == 1
    assert found["swarm_members_on_head"] + sum(node.held < status.head for node in status.nodes) == 40
    assert found["swarm_members_quarantined"] == 1
    assert found["swarm_samples_total{outcome=accepted}{reason=}"] == status.work.accepted
    assert found["swarm_samples_total{outcome=refused}{reason=lease expired}"] == status.work.refused["lease expired"]
    assert found["swarm_publish_to_apply_seconds_count"] == 20
    assert found["swarm_publish_to_apply_seconds_bucket{le=+Inf}"] == 20
    assert found["swarm_egress_budget_ratio"] == pytest.approx(74.1 / 88.8)


def test_metrics_of_a_node():
    found = scraped(NODE)
    assert (found["swarm_version"], found["swarm_lag_versions"], found["swarm_engine_ready"]) == (4, 1, 1)
    assert (found["swarm_engine_pause_seconds_count"], found["swarm_engine_pause_seconds_sum"]) == (1, 0.03)
    assert found["swarm_samples_total{outcome=refused}{reason=version too old}"] == 2
    assert found["swarm_time_seconds_total{doing=generate}"] == 9
    assert found["swarm_each_engine_ready{engine=1}"] == 1
    assert found["swarm_each_engine_ready{engine=2}"] == 0
    assert found["swarm_each_engine_sequences{engine=1}"] == 6
    assert found["swarm_each_engine_restarts_total{engine=2}"] == 3
    assert found["swarm_engines_asleep"] == 0


def test_no_metric_has_a_label_for_each_member():
    assert len(scraped(made_up_status(2000, 700.0))) == len(scraped(made_up_status(40, 700.0)))


def test_a_version_is_observed_once():
    seen, status = Observations(), made_up_status(8, 700.0)
    for at_s in (700.0, 700.0, 705.0, 715.0):  # the version of 700 s is complete at 710 s
        status = made_up_status(8, at_s)
        seen.look(status)
    assert sum(seen.apply.counts) == 21
    assert seen.apply.total == pytest.approx(sum(step.publish_to_all_s or 0 for step in status.steps))


def test_buckets_are_cumulative():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 12.0


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (SeedStatus(), "No version is sealed yet."),
        (SeedStatus(head=(0, 3)), "Version 3 is sealed, and no node has joined yet."),
        (SeedStatus(head=(0, 3), nodes=[MemberStatus(name="box", held=(0, 3))]), "box has version 3."),
        (
            SeedStatus(head=(1, 3), nodes=[MemberStatus(held=(1, 3)), MemberStatus(held=(0, 9))],
                       steps=[Step(version=(1, 3), age_s=2.12)]),
            "1 of 2 nodes have version 3 (epoch 1); the slowest is 2.1 s behind.",
        ),
        (NodeStatus(), "This machine waits to be admitted to the swarm."),
        (NodeStatus(nodes=[OwnStatus(slot=1, catching_up=0.31)]), "This machine fetches the model: 31% is here."),
        (NODE, "This machine holds version 4; the newest is 5."),
    ],
)  # fmt: skip
def test_headlines(status: Status, text: str):
    assert headline(status) == text


def member(**fields: object) -> SeedStatus:
    return SeedStatus(head=(0, 9), nodes=[MemberStatus(slot=4, name="box", held=(0, 9), standing="fresh", **fields)])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("status", "what", "todo"),
    [
        (SeedStatus(head=(0, 1)), "No machine has joined.", "swarm-node invite"),
        (member(reached="circuit"), "box is reached through a relay only", "--announce"),
        (member(saving=True), "box has sent nearly all", "--up-gb-day"),
        (
            member(quarantine=QuarantineStatus(why="copied")),
            "box is in quarantine and gets no work: copied.",
            "--release",
        ),
        (SeedStatus(nodes=[MemberStatus(name="box", standing="dead")]), "box is silent", "running?"),
        (
            SeedStatus(nodes=[MemberStatus(name="box", standing="soft", lease_s=9)]),
            "its lease ends in 9.0 s",
            "running?",
        ),
        (
            SeedStatus(head=(0, 9), nodes=[MemberStatus(name="box", standing="fresh", held=(0, 6))]),
            "box is 3 versions behind.",
            "kick box",
        ),
        (SeedStatus(nodes=[MemberStatus()], work=LedgerStatus(groups_open=3)), "3 request groups wait", "join"),
        (member(), None, None),
        (NodeStatus(message="No seed."), "No seed.", ""),
        (NodeStatus(nodes=[OwnStatus(slot=1, standing="fresh", live_proven=False)]), "does not hold", "Restart"),
        (
            NodeStatus(nodes=[OwnStatus(slot=1, standing="fresh", held=(0, 1), engine=None, asleep=True)]),
            "The engines are asleep",
            "swarm-node wake",
        ),
        (
            NodeStatus(nodes=[OwnStatus(standing="fresh", engines=[EngineStatus(), EngineStatus(why="No kernel.")])]),
            "Engine 2 was given up: No kernel.",
            "Mend that",
        ),
    ],
)
def test_what_is_wrong(status: Status, what: str | None, todo: str | None):
    found = findings(status)
    if what is None:
        assert found == []
    else:
        assert what in found[0].what
        assert todo is not None
        assert todo in found[0].todo


def test_findings_are_bounded():
    nodes = [MemberStatus(slot=slot, standing="dead") for slot in range(500)]
    assert len(findings(SeedStatus(nodes=nodes))) == MOST


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"slot": -1}, "not admitted"),
        ({"standing": "soft"}, "lease is soft"),
        ({"held": None, "catching_up": 0.5}, "not here yet (50%)"),
        ({"engine": None}, "engine is not ready"),
        ({"live_proven": False}, "not those of its version"),
    ],
)
def test_readiness(change: dict[str, object], why: str):
    fields: dict[str, object] = {"slot": 1, "standing": "fresh", "held": (0, 5), "engine": (0, 5), **change}
    status = NodeStatus(head=(0, 5), nodes=[OwnStatus(**fields)])  # pyright: ignore[reportArgumentType]
    answer = Readiness().why_not(status, 0.0)
    assert (answer == "") == (why == "")
    assert why in answer


def test_a_node_stays_ready_while_a_version_travels():
    readiness, own = Readiness(), OwnStatus(slot=1, standing="fresh", held=(0, 5))
    assert readiness.why_not(NodeStatus(head=(0, 5), nodes=[own]), 100.0) == ""
    assert readiness.why_not(NodeStatus(head=(0, 6), nodes=[own]), 100.0 + BEHIND_S) == ""
    assert "newest is 6" in readiness.why_not(NodeStatus(head=(0, 6), nodes=[own]), 101.0 + BEHIND_S)
    assert "newest is 6" in Readiness().why_not(NodeStatus(head=(0, 6), nodes=[own]), 0.0)


def test_history_gives_the_frame_of_a_time():
    history = History()
    assert history.at(0.0) is None
    for at in range(0, 100, 10):
        history.add(Point(float(at), 1.0), json.dumps(at).encode())
    assert [history.at(at) for at in (-5.0, 0.0, 41.0, 90.0, 1e9)] == [b"0", b"0", b"50", b"90", b"90"]
    history.add(Point(KEPT_S + 55.0), b"new")
    assert [point.at for point in history.points()] == [60.0, 70.0, 80.0, 90.0, KEPT_S + 55.0]


def test_history_is_bounded_in_memory():
    history, chance = History(), random.Random(1)
    for at in range(12):
        history.add(Point(float(at)), chance.randbytes(MOST_BYTES // 5))
    assert len(history.points()) == 4
    history.add(Point(20.0), chance.randbytes(2 * MOST_BYTES))
    assert len(history.points()) == 1
