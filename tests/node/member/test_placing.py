"""Where a node keeps its replica, by what is free and whether its engine is still to come."""

from pathlib import Path

import pytest

from codec.errors import UsageError
from node.member import placing
from node.member.placing import Placing
from node.settings.config import JoinConfig

GB = 10**9
MODEL = 4 * GB


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the machine has left, in bytes; tests change it."""
    left = {"memory": 64 * GB, "disk": 64 * GB}
    monkeypatch.setattr(placing, "free_bytes", lambda: left["memory"])
    monkeypatch.setattr(placing, "disk_free_bytes", lambda folder: left["disk"])
    monkeypatch.setattr(placing, "gpu_files", lambda: False)
    return left


def a_node(home: Path, **settings) -> Placing:
    return Placing(JoinConfig(home=home, **settings))


def test_the_engine_counts_before_it_has_started(free: dict[str, int], tmp_path: Path) -> None:
    node = a_node(tmp_path)
    free["memory"] = 12 * GB  # the replica and nothing of the engine's 9 GB beside it
    assert node.on_disk(MODEL, MODEL) is True
    assert node.plan is not None
    assert node.plan.nbytes > 8 * GB


def test_an_engine_that_runs_is_not_counted_again(free: dict[str, int], tmp_path: Path) -> None:
    node = a_node(tmp_path)
    assert node.on_disk(MODEL, MODEL) is False
    needs = node.plan
    free["memory"] = 6 * GB  # the engine has taken its part
    assert node.on_disk(MODEL, MODEL) is False
    assert node.plan == needs


def test_an_engine_on_a_gpu_needs_little_of_the_machine(free: dict[str, int], tmp_path: Path) -> None:
    free["memory"] = 7 * GB
    assert a_node(tmp_path, device="cuda").on_disk(MODEL, MODEL) is False
    assert a_node(tmp_path, engine="none").on_disk(MODEL, MODEL) is False


def test_a_gpu_that_the_machine_has_is_used(
    free: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "gpu_files", lambda: True)
    free["memory"] = 7 * GB
    assert a_node(tmp_path).on_disk(MODEL, MODEL) is False


def test_an_engine_whose_memory_is_the_replica_needs_none_beside_it(free: dict[str, int], tmp_path: Path) -> None:
    node = a_node(tmp_path, replica="engine")
    free["memory"] = 12 * GB
    assert node.on_disk(MODEL, MODEL) is True
    assert node.plan is not None
    parts = {part.what: part.nbytes for part in node.plan.parts}
    assert parts["replica"] == 0
    assert 0 < parts["blocks read from the engine"] < 64 << 20
    assert parts["engine"] > 2 * MODEL


def test_weights_on_a_gpu_are_no_replica(free: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^--replica engine: .* GPU .*--device cpu"):
        a_node(tmp_path, replica="engine", device="cuda:1").on_disk(MODEL, MODEL)
    monkeypatch.setattr(placing, "gpu_files", lambda: True)
    with pytest.raises(UsageError, match=r"^--replica engine: .* GPU .*--device cpu"):
        a_node(tmp_path, replica="engine").on_disk(MODEL, MODEL)
    assert a_node(tmp_path, replica="engine", device="cpu").on_disk(MODEL, MODEL) is True
    says_itself = a_node(tmp_path, replica="engine", engine="vllm")  # vLLM says where it runs
    assert says_itself.on_disk(MODEL, MODEL) is True


def test_too_little_for_the_place_that_was_asked_for(free: dict[str, int], tmp_path: Path) -> None:
    free["memory"] = 3 * GB
    with pytest.raises(UsageError, match=r"^This node needs 4\.\d GB .* 3\.0 GB are free: --replica disk needs 0"):
        a_node(tmp_path, engine="none", replica="ram").on_disk(MODEL, MODEL)
    assert a_node(tmp_path, engine="none").on_disk(MODEL, MODEL) is True


def test_a_shard_is_kept_in_memory_or_refused(free: dict[str, int], tmp_path: Path) -> None:
    """Its size is that of its blocks, which the caller says."""
    node = a_node(tmp_path, engine="none", shard="1/4")
    free["memory"] = 5 * GB
    assert node.on_disk(MODEL, MODEL) is False
    free["memory"] = 4 * GB
    with pytest.raises(UsageError, match="name fewer ranks"):
        node.on_disk(MODEL, MODEL)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"engine": "transformers"}, "--engine none"),
        ({"engine": "none", "replica": "disk"}, "--replica disk"),
        ({"engine": "none", "replica": "none"}, "--replica none"),
        ({"engine": "none", "raw_out": Path("out")}, "--raw-out"),
    ],
)
def test_what_needs_the_whole_model_does_not_go_with_a_shard(settings: dict, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        JoinConfig(home=tmp_path, shard="1/4", **settings)


def test_a_node_with_a_format_counts_its_codes_and_a_whole_engine(free: dict[str, int], tmp_path: Path) -> None:
    held = MODEL // 4
    node = a_node(tmp_path, format=("int4-group-e8",))
    assert node.on_disk(held, MODEL) is False
    assert node.plan is not None
    parts = {part.what: part.nbytes for part in node.plan.parts}
    assert parts["replica"] == held
    assert parts["engine"] > 2 * MODEL  # the bf16 base that the codes stand for, as float32
    assert parts["staged changes"] == held // 20

    free["memory"] = 4 * GB
    assert a_node(tmp_path, format=("int4-group-e8",), engine="none").on_disk(held, MODEL) is False
    with pytest.raises(UsageError, match=r"needs 10\.\d GB .* 4\.0 GB are free: --engine none holds the format"):
        a_node(tmp_path, format=("int4-group-e8",)).on_disk(held, MODEL)  # and the disk would not help
