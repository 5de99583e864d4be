"""What an endpoint makes of the uplink that somebody said, or nobody did."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from codec.sign import Key
from node.host.endpoint import Endpoint
from swarm.protocol.core.tuning import Tuning
from swarm.runtime.limits import Limits


@pytest.mark.parametrize(
    ("said", "held_back_to"),
    [(None, math.inf), (200.0, 200.0), (100.0, 100.0), (999.0, 999.0), (1000.0, math.inf), (0.0, math.inf)],
)
def test_what_is_sent_is_held_back_only_where_somebody_said_so(
    said: float | None, held_back_to: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Limits] = []
    monkeypatch.setattr("node.host.endpoint.Shell", lambda *_, limits, **__: taken.append(limits))
    key, core = Key(bytes(32)), SimpleNamespace(admits=lambda _: True, knows=lambda _: True)
    store: Any = SimpleNamespace(records=SimpleNamespace(seals=list))
    face: Any = SimpleNamespace()
    Endpoint.build(
        core,  # type: ignore[arg-type]
        key, key.public, store, face, listen=("/ip4/127.0.0.1/tcp/0",), tuning=Tuning.named("loopback"), up_mbit=said,
    )  # fmt: skip
    assert [limits.up_mbit for limits in taken] == [held_back_to]
