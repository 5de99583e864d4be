"""The log of a run of the product's runtime, applied to new cores, gives the same decisions: a core decides by its
events alone, so what the simulator shows of cores holds for real ones."""

import copy
from pathlib import Path
from typing import Any

import pytest
import runtime_kit
from runtime_kit import swarm, until

from swarm.protocol.authority import Authority
from swarm.protocol.core.events import VersionId
from swarm.protocol.member import Peer

Log = list[tuple[str, tuple[Any, ...], list[Any]]]
"""Of one core: the method, its arguments, and the effects that it returned."""


def recording(usual: type[Any], made: list[tuple[type[Any], tuple[Any, ...], dict[str, Any], Log]]) -> type[Any]:
    """A core that writes down how it was made and what it was told."""

    class Recording(usual):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.log: Log = []
            made.append((usual, tuple(map(_copied, args)), options, self.log))
            super().__init__(*args, **options)

        def start(self, *args: Any) -> list[Any]:
            effects = super().start(*args)
            self.log.append(("start", args, list(effects)))
            return effects

        def apply(self, *args: Any) -> list[Any]:
            effects = super().apply(*args)
            self.log.append(("apply", args, list(effects)))
            return effects

    return Recording


def _copied(value: Any) -> Any:
    """What a core changes in place, as it was."""
    return copy.deepcopy(value) if type(value).__name__ in ("Random", "Budget") else value


async def test_a_log_gives_the_same_decisions_again(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[type[Any], tuple[Any, ...], dict[str, Any], Log]] = []
    for name, usual in (("Authority", Authority), ("Peer", Peer)):
        monkeypatch.setattr(runtime_kit, name, recording(usual, made))
    async with swarm(tmp_path) as s:
        hosts = [await s.start_member(number) for number in (1, 2, 3)]
        for number in (1, 2):
            await s.publish(number)
            await until(lambda number=number: all(h.model.version == VersionId(0, number) for h in hosts))
        await s.stop(hosts[0])
        await s.publish(3)
        await until(lambda: all(h.model.version == VersionId(0, 3) for h in hosts[1:]))
    monkeypatch.undo()
    assert len(made) == 4
    for usual, args, options, log in made:
        core = usual(*args, **options)
        assert len(log) > 50
        for number, (method, told, effects) in enumerate(log):
            assert getattr(core, method)(*told) == effects, f"{usual.__name__}: event {number}, {told}"
