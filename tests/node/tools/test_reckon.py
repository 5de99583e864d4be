"""`delta --shapes`: shape tables, and reckoned sizes against steps that are really coded."""

import json
from pathlib import Path

import numpy as np
import pytest

from codec.bits import Bits
from codec.checkpoint import write_checkpoint
from codec.errors import UsageError
from codec.layout import BLOCK_ELEMENTS
from node.settings import memory_plan
from node.tools.delta import delta
from node.tools.distribution import EgressPrices, dollars_of, seconds_of, swarm_seconds
from node.tools.made_up import amplitude_of, made_up_norm, made_up_step
from node.tools.reckon import Reckoned, reckon, render
from node.tools.shapes import Kind, Shapes, shape_names, shapes_of
from node.tools.table import bytes_text, seconds_text, usd_text

PARAMETERS = {
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "llama-3-70b": 70_553_706_496,
    "kimi-k2": 1_026_408_209_408,
}


def test_the_tables_have_the_published_numbers_of_parameters() -> None:
    assert {name: shapes_of(name).elements for name in shape_names()} == PARAMETERS


def test_a_table_becomes_the_layout_of_a_checkpoint() -> None:
    layout = shapes_of("Qwen3-8B").layout
    assert layout.full_bytes == 2 * PARAMETERS["qwen3-8b"]
    assert layout.tensor("model.layers.35.mlp.down_proj.weight").shape == (4096, 12288)
    assert layout.tensor("model.norm.weight").elements == 4096
    assert len(layout.tensors) == 36 * 11 + 3


def test_experts_and_layers_are_counted_and_named() -> None:
    kind = Kind("l{layer}.e{expert}", (3, 4), first_layer=1, layers=2, experts=3)
    assert list(kind.names()) == ["l1.e0", "l1.e1", "l1.e2", "l2.e0", "l2.e1", "l2.e2"]
    assert Shapes("m", (kind, Kind("norm", (5,)))).elements == 6 * 12 + 5


def test_a_scaled_model_has_the_same_rows_in_smaller_number() -> None:
    shapes = shapes_of("kimi-k2").scaled(1000)
    assert shapes.elements == pytest.approx(PARAMETERS["kimi-k2"] / 1000, rel=1e-3)
    experts = shapes.layout.tensor("model.layers.1.mlp.experts.0.gate_proj.weight")
    assert experts.shape == (round(60 * 384 * 2048 / 1000), 7168)
    with pytest.raises(UsageError, match="1 or more"):
        shapes.scaled(0)


def test_unknown_shapes_and_densities() -> None:
    with pytest.raises(UsageError, match="kimi-k2"):
        shapes_of("qwen9")
    for density in (0.0, 0.9):
        with pytest.raises(UsageError, match="--density"):
            reckon(shapes_of("qwen3-1.7b"), density=density)


def step(shapes: Shapes, density: float, seed: int) -> tuple[dict[str, Bits], dict[str, Bits]]:
    """A made-up step of all tensors of a model, before and after."""
    rng, before, after = np.random.default_rng(seed), {}, {}
    for kind in shapes.kinds:
        for name in kind.names():
            if len(kind.shape) == 1:
                before[name] = after[name] = made_up_norm(kind.elements)
            else:
                before[name], after[name] = made_up_step(*kind.shape, amplitude_of(density), rng)
    return before, after


@pytest.mark.parametrize(
    ("name", "scale", "density"),
    [("qwen3-8b", 1000, 0.01), pytest.param("kimi-k2", 50_000, 0.004, marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_a_really_coded_step_has_the_reckoned_size(name: str, scale: int, density: float, tmp_path: Path) -> None:
    """The small model is written to disk twice and compared by `delta`, as a user's checkpoints are."""
    shapes = shapes_of(name).scaled(scale)
    before, after = step(shapes, density, seed=11)
    for folder, bits in (("old", before), ("new", after)):
        write_checkpoint(tmp_path / folder, shapes.layout, bits.__getitem__, {})
    real = delta(tmp_path / "old", tmp_path / "new", up_mbit=100, nodes=10)
    assert real.exact
    same = reckon(shapes, density=density, up_mbit=100, nodes=10)
    assert (same.elements, same.blocks, same.full_bytes) == (real.elements, real.blocks, real.full_bytes)
    assert same.chunks == pytest.approx(real.chunks, abs=1)
    assert same.delta_bytes == pytest.approx(real.delta_bytes, rel=0.10)
    assert same.bits_per_change == pytest.approx(real.bits_per_change, rel=0.03)
    assert same.seconds.swarm == pytest.approx(real.swarm_s, rel=0.10)
    assert same.seconds.star_full == real.star_full_s

    whole = reckon(shapes_of(name), density=density)
    assert whole.delta_bytes / scale == pytest.approx(real.delta_bytes, rel=0.10)


@pytest.fixture(scope="module")
def found() -> Reckoned:
    prices = EgressPrices(trainer_usd_gb=0.09, node_usd_gb=0.01)
    return reckon(shapes_of("qwen3-1.7b"), up_mbit=100, nodes=8, prices=prices)


def test_the_size_of_a_step(found: Reckoned) -> None:
    assert found.changed == round(0.01 * PARAMETERS["qwen3-1.7b"])
    assert found.bits_per_change == pytest.approx(7.16, abs=0.1)  # 7.14 coded: docs/codec.md
    assert found.delta_bytes * 8 == pytest.approx(found.bits_per_change * found.changed)
    assert found.ratio == found.full_bytes / found.delta_bytes
    assert found.blocks == shapes_of("qwen3-1.7b").layout.n_blocks


@pytest.mark.slow
@pytest.mark.long
def test_a_denser_step_takes_more_bytes_and_fewer_bits_a_change(found: Reckoned) -> None:
    denser = reckon(shapes_of("qwen3-1.7b"), density=0.025)
    assert denser.delta_bytes > 1.9 * found.delta_bytes
    assert denser.bits_per_change < found.bits_per_change


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(found: Reckoned) -> None:
    again, other = (reckon(shapes_of("qwen3-1.7b"), seed=seed).delta_bytes for seed in (0, 1))
    assert again == found.delta_bytes != other
    assert other == pytest.approx(again, rel=0.01)


def test_the_seconds_by_hand() -> None:
    """80 Mbit/s are 10 MB/s. 4 nodes: a star sends 4 copies of 100 MB or of 1 MB; the swarm's trainer sends 1 MB."""
    seconds = seconds_of(100_000_000, 1_000_000, 4, 80)
    assert (seconds.star_full, seconds.star_delta, seconds.swarm) == (40.0, 0.4, 0.1)
    assert swarm_seconds(1e6, 4, 10e6, 0.0) == 0.4  # nodes that send nothing leave all to the trainer
    assert swarm_seconds(1e6, 4, 10e6, 2.5e6) == 0.2  # 4 MB over 20 MB/s of all uplinks together


def test_the_dollars_by_hand() -> None:
    """5 nodes, 10 GB in full, 0.1 GB of delta: the trainer pays 0.09 a GB, a node 0.02, and 0.01 to receive."""
    dollars = dollars_of(10_000_000_000, 100_000_000, 5, EgressPrices(0.09, 0.02, 0.01))
    assert dollars.star_full == pytest.approx(5 * 10 * (0.09 + 0.01))
    assert dollars.star_delta == pytest.approx(5 * 0.1 * (0.09 + 0.01))
    assert dollars.swarm == pytest.approx(0.1 * (0.09 + 4 * 0.02 + 5 * 0.01))


def test_the_memory_by_role(found: Reckoned) -> None:
    layout = shapes_of("qwen3-1.7b").layout
    memory = found.memory
    assert 2 * layout.nbytes < memory["trainer"] < 2.1 * layout.nbytes
    assert memory["node"] - memory["node_on_disk"] == layout.nbytes
    assert 0 < memory["node_from_engine"] - memory["node_on_disk"] < 64 << 20
    assert layout.nbytes < memory["seed"] < 1.2 * layout.nbytes
    assert memory["relay"] == memory_plan.relay().nbytes


def test_the_report(found: Reckoned) -> None:
    text = render(found)
    for words in ("no step was measured", "to 8 nodes", "bits a change", "of traffic", "relay"):
        assert words in text
    answer = json.loads(json.dumps(found.to_dict()))
    assert answer["reckoned"] is True
    assert {"star_full_s", "star_delta_s", "swarm_s", "bits_per_change", "delta_bytes", "chunks"} <= answer.keys()
    assert set(answer["memory_bytes"]) == {"trainer", "seed", "node", "node_on_disk", "node_from_engine", "relay"}
    assert answer["usd"]["swarm"] < answer["usd"]["star_delta"] < answer["usd"]["star_full"]


def test_figures_for_people() -> None:
    assert [bytes_text(count) for count in (12, 9.13e9, 2.05e12)] == ["12 B", "9.13 GB", "2.05 TB"]
    assert [seconds_text(count) for count in (0.41, 600, 7200, 1e6)] == ["0.41 s", "10 min", "2 h", "11.6 days"]
    assert [usd_text(count) for count in (0, 0.0292, 1234.5)] == ["$0.00", "$0.0292", "$1,234.50"]


def test_a_made_up_step_has_the_density_that_was_asked_for() -> None:
    old, new = made_up_step(512, 4096, amplitude_of(0.02), np.random.default_rng(5))
    assert np.mean(old != new) == pytest.approx(0.02, rel=0.1)
    assert np.array_equal(made_up_norm(3).view(np.uint16), [0x3F80] * 3)
    assert BLOCK_ELEMENTS % 4096 == 0
