"""The schema: the keys of the JSON that users read do not change, and different releases understand each other."""

import json

import msgspec
import pytest
from status_kit import GOLDEN, example, paths

from node.status.schema import (
    NodeStatus,
    OwnStatus,
    RelayStatus,
    SeedReport,
    SeedStatus,
    Status,
    to_plain,
)
from node.trainers.standing import standing


@pytest.mark.parametrize(
    ("process", "status"),
    [
        ("seed", example(SeedStatus)),
        ("node", example(NodeStatus)),
        ("node without engine", NodeStatus(nodes=[OwnStatus()])),
        ("relay", RelayStatus(nodes=[OwnStatus()])),
    ],
)
def test_json_has_the_keys_that_it_always_had(process: str, status: Status) -> None:
    assert paths(json.loads(json.dumps(to_plain(status)))) == GOLDEN[process]


def test_the_trainers_state_has_the_keys_that_it_always_had() -> None:
    found = paths(json.loads(json.dumps(standing(example(SeedReport)))))
    found = [
        path for path in found if ".quarantine." not in path
    ]  # no node was in quarantine when the keys were recorded
    assert ["head", "unsealed", *found] == GOLDEN["Swarm.state"]


@pytest.mark.parametrize("status", [example(SeedStatus), example(NodeStatus), RelayStatus(places=3)])
def test_a_status_round_trips(status: Status) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=Status) == status


def test_a_process_of_another_release_is_understood() -> None:
    newer = {"role": "seed", "head": [0, 7], "weather": "fine", "nodes": [{"name": "box", "mood": {"good": 1}}]}
    status = msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=Status)
    assert isinstance(status, SeedStatus)
    assert (status.head, status.nodes[0].name, status.nodes[0].held) == ((0, 7), "box", None)
