"""An endpoint limits its rate by the uplink that the user gave, if any."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from codec.sign import Key
from node.host.endpoint import Endpoint, NetworkOptions
from swarm.protocol.core.tuning import Tuning
from swarm.runtime.limits import RuntimeLimits


@pytest.mark.parametrize(
    ("up_mbit", "limited_to"),
    [(None, math.inf), (200.0, 200.0), (100.0, 100.0), (999.0, 999.0), (1000.0, math.inf), (0.0, math.inf)],
)
def test_the_rate_is_limited_only_by_a_given_uplink_below_1000_mbit(
    up_mbit: float | None, limited_to: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[RuntimeLimits] = []
    monkeypatch.setattr("node.host.endpoint.Runtime", lambda *_, limits, **__: taken.append(limits))
    key, core = Key(bytes(32)), SimpleNamespace(admits=lambda _: True, knows=lambda _: True)
    store: Any = SimpleNamespace(records=SimpleNamespace(seals=list))
    application: Any = SimpleNamespace()
    network = NetworkOptions(("/ip4/127.0.0.1/tcp/0",), up_mbit=up_mbit)
    Endpoint.build(
        core,  # type: ignore[arg-type]
        key, key.public, store, application, network, tuning=Tuning.named("loopback"),
    )  # fmt: skip
    assert [limits.up_mbit for limits in taken] == [limited_to]
