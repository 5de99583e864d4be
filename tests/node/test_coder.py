"""How a seed chooses the next version's coder: the user's choice, or by uplinks, cores and the last version."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from codec.chunk import CODER_PCO, CODER_RICE
from codec.layout import Layout, TensorSpec
from node.coordinator.coordinator import Coordinator
from node.settings.config import SeedConfig

LAYOUT = Layout((TensorSpec("w", "BF16", (8_190_735_360,)),))


def coder(config: SeedConfig, ups: list[float] | None, changed: int | None, downs: tuple[float, ...] = ()) -> int:
    """Return the coder that a coordinator with these nodes and this last version chooses."""
    roster = None if ups is None else SimpleNamespace(members=[SimpleNamespace(up_mbit=up) for up in ups])
    manifest = None if changed is None else SimpleNamespace(changed=changed)
    core = SimpleNamespace(state=SimpleNamespace(roster=roster, manifest=manifest), down_mbits=downs)
    coordinator = Coordinator.__new__(Coordinator)
    coordinator.core, coordinator._config = core, config
    coordinator._publisher = SimpleNamespace(replica=SimpleNamespace(layout=LAYOUT))
    return coordinator.coder()


@pytest.mark.parametrize(
    ("up_mbit", "cores", "ups", "changed", "chosen"),
    [
        (100, 1, [100.0] * 4, 82_000_000, CODER_RICE),
        (1000, 1, [1000.0] * 4, 82_000_000, CODER_PCO),
        (1000, 1, [10.0] * 40, 82_000_000, CODER_RICE),  # limited by the nodes' own uplinks
        (1000, 8, [1000.0] * 4, 82_000_000, CODER_RICE),  # enough cores
        (1000, 8, [1000.0] * 4, 4_000_000, CODER_PCO),  # so small that decoding decides
        (1000, 1, [1000.0] * 4, 800_000_000, CODER_RICE),  # so large that the link decides
        (1000, 1, None, None, CODER_PCO),  # no nodes and no step yet: assumes 1 %
        (1000, 1, [], 0, CODER_PCO),  # an empty version does not predict the next
    ],
)
def test_the_automatic_choice(tmp_path: Path, up_mbit, cores, ups, changed, chosen) -> None:
    config = SeedConfig(base=tmp_path, coder="auto", up_mbit=up_mbit, node_cores=cores)
    assert coder(config, ups, changed) == chosen


def test_the_slowest_downlink_decides(tmp_path: Path) -> None:
    config = SeedConfig(base=tmp_path, coder="auto", up_mbit=1000, node_cores=1)
    assert coder(config, [1000.0] * 4, 82_000_000, (1000.0, 1000.0, 1000.0, 1000.0)) == CODER_PCO
    assert coder(config, [1000.0] * 4, 82_000_000, (1000.0, 50.0, 1000.0, 1000.0)) == CODER_RICE


@pytest.mark.parametrize(("name", "chosen"), [("rice", CODER_RICE), ("pco", CODER_PCO)])
def test_the_users_choice_has_precedence(tmp_path: Path, name, chosen) -> None:
    assert coder(SeedConfig(base=tmp_path, coder=name), [1000.0], 82_000_000) == chosen
