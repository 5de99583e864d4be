"""What each process needs, and the sentence when there is too little."""

import pytest

from codec.errors import UsageError
from node.settings.memory_plan import Plan, keep_on_disk, node, publisher, relay, require, seed, shortage

GB = 10**9
MODEL = 16 * GB


def factor(plan: Plan) -> float:
    """What the plan needs, as a multiple of the model."""
    return plan.nbytes / MODEL


@pytest.mark.parametrize(
    ("plan", "least", "most"),
    [
        (seed(MODEL), 1.0, 1.15),
        (publisher(MODEL, copies=2), 2.0, 2.05),
        (publisher(MODEL, copies=0), 0.0, 0.15),
        (node(MODEL, on_disk=False), 1.0, 1.15),
        (node(MODEL, on_disk=True), 0.05, 0.15),
        (node(MODEL, on_disk=True, from_engine=True), 0.05, 0.15),
        (node(MODEL, on_disk=False, engine="transformers"), 3.0, 3.46),
        (node(MODEL, on_disk=False, engine="transformers", device="cuda"), 1.0, 1.25),
        (node(MODEL, on_disk=False, engine="vllm"), 1.0, 1.15),
    ],
)
def test_each_role_needs_its_factor_of_the_model(plan: Plan, least: float, most: float) -> None:
    assert least <= factor(plan) <= most


def test_staged_changes_of_a_large_model_are_bounded() -> None:
    staged = {part.what: part.nbytes for part in seed(2000 * GB).parts}["staged changes"]
    assert staged == 2 << 30


def test_two_engines_need_twice_as_much() -> None:
    one, two = (node(MODEL, on_disk=False, engine="transformers", engines=n).nbytes for n in (1, 2))
    assert two - one > 2 * MODEL


def test_a_plan_that_fits_says_nothing() -> None:
    assert shortage(relay(), relay().nbytes, "more") == ""
    assert shortage(relay(), None, "more") == ""
    require(relay(), relay().nbytes, "more")


def test_a_shortage_names_what_is_needed_what_there_is_and_what_helps() -> None:
    with pytest.raises(UsageError, match=r"^This seed needs 17\.3 GB \(16\.0 replica \+ 0\.8 staged changes .*\) of "
                                         r"memory, and 8\.0 GB are free: use a machine with more\.$"):  # fmt: skip
        require(seed(MODEL), 8 * GB, "use a machine with more")


def test_an_engine_that_can_be_left_out_is_named() -> None:
    with_engine = [node(MODEL, on_disk=disk, engine="transformers") for disk in (False, True)]
    with pytest.raises(UsageError, match=r"engine .*--replica disk needs 35\.8 GB; --engine none"):
        keep_on_disk("ram", *with_engine, 8 * GB, MODEL, 99 * GB)


def place(place, memory: int | None, disk: int) -> bool:
    return keep_on_disk(place, node(MODEL, on_disk=False), node(MODEL, on_disk=True), memory, MODEL, disk)


@pytest.mark.parametrize(
    ("chosen", "memory", "disk", "on_disk"),
    [
        ("auto", 20 * GB, 0, False),
        ("auto", 17 * GB, 100 * GB, True),  # the replica would fit, and nothing beside it
        ("auto", None, 0, False),
        ("ram", 20 * GB, 0, False),
        ("disk", 99 * GB, 0, True),
        ("engine", 99 * GB, 0, True),
    ],
)
def test_auto_prefers_memory_and_falls_back_to_disk(chosen, memory, disk, on_disk) -> None:
    assert place(chosen, memory, disk) is on_disk


@pytest.mark.parametrize(
    ("chosen", "memory", "disk", "text"),
    [
        ("auto", 4 * GB, 5 * GB, r"This node needs 17\.\d GB.* 4\.0 GB are free.*on disk .* 5\.0 GB.*-node relay"),
        (
            "ram",
            4 * GB,
            100 * GB,
            r"needs 17\.\d GB.* 4\.0 GB are free: --replica disk needs 1\.\d GB.*swarm-node relay",
        ),
        ("disk", 1 * GB, 100 * GB, r"needs 1\.\d GB.* 1\.0 GB are free.*swarm-node relay"),
        ("auto", 1 * GB, 100 * GB, r"needs 1\.\d GB.* 1\.0 GB are free.*swarm-node relay"),
    ],
)
def test_no_room_is_reported_before_anything_is_reserved(chosen, memory, disk, text) -> None:
    with pytest.raises(UsageError, match=text):
        place(chosen, memory, disk)
