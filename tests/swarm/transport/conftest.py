import sys
from pathlib import Path

import pytest
import trio

from swarm.transport.nat.punch import Puncher

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def no_punching(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stay(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Puncher, "keep_trying", stay)
