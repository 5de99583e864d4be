"""Which devices each engine gets: for any machine, model and flags."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codec.errors import UsageError
from node.engines.device_plan import (
    CACHE_SHARE,
    RANKS,
    USED_SHARE,
    DeviceShare,
    Gpu,
    Machine,
    ModelNeeds,
    needs_of,
    plan_devices,
    share_of,
)

GB = 10**9
CORES = tuple(range(8))


def gpus(count: int, nbytes: int = 80 * GB) -> Machine:
    return Machine(tuple(Gpu(str(index), nbytes) for index in range(count)), CORES)


machines = st.builds(
    lambda names, sizes, cores: Machine(
        tuple(Gpu(name, size) for name, size in zip(names, sizes, strict=False)), tuple(range(cores))
    ),
    st.lists(st.sampled_from([*map(str, range(8)), "GPU-5b", "MIG-7f", "GPU-aa"]), max_size=9, unique=True),
    st.lists(st.integers(GB, 200 * GB), min_size=9, max_size=9),
    st.integers(1, 64),
)
models = st.none() | st.builds(
    ModelNeeds,
    st.integers(1, 1500 * GB),
    st.none() | st.integers(1, 128),
    st.integers(0, 100 * GB),
    st.integers(1, 16),
)
chosen = st.integers(0, 12)


@given(machines, models, chosen, chosen)
@example(gpus(8), ModelNeeds(16 * GB, 32), 0, 0)
@example(gpus(3), ModelNeeds(100 * GB, 40), 0, 0)
@example(Machine((), (0,)), None, 4, 3)
def test_a_plan_gives_each_device_to_one_engine_or_says_why_there_is_none(
    machine: Machine, model: ModelNeeds | None, engines: int, ranks: int
) -> None:
    try:
        plan = plan_devices(machine, model, engines, ranks)
    except UsageError as error:
        text = str(error)
        assert "\n" not in text
        assert len(text) < 400
        impossible = max(1, engines) * max(1, ranks) > len(machine.gpus) > 0
        divided = model is None or not ranks or model.divides(ranks)
        assert impossible or not divided or (model is not None and machine.gpus)
        return
    assert plan.ranks == ranks or not ranks
    assert len(plan.shares) == engines or not engines
    assert "\n" not in str(plan)
    if not machine.gpus:
        assert all(not share.gpus and set(share.cores) <= set(machine.cores) for share in plan.shares)
        assert len(plan.shares) == (engines or 1)
        return
    given_out = [name for share in plan.shares for name in share.gpus]
    assert [*given_out, *plan.idle] == [gpu.name for gpu in machine.gpus], "each once, in the machine's order"
    assert all(len(share.gpus) == plan.ranks for share in plan.shares)
    if not engines:
        assert len(plan.idle) < plan.ranks, "another engine would have had room"
    if model is None or ranks:
        return
    least = min(gpu.nbytes for gpu in machine.gpus)
    assert plan.ranks in RANKS
    assert model.divides(plan.ranks)
    assert model.fits(plan.ranks, least)
    fewer = [count for count in RANKS if count < plan.ranks and model.divides(count)]
    assert not any(model.fits(count, least) for count in fewer), "the fewest that have room"


@given(st.integers(1, 64), st.integers(2, 12))
def test_engines_on_a_cpu_share_its_cores_evenly(cores: int, engines: int) -> None:
    shares = plan_devices(Machine((), tuple(range(cores))), None, engines).shares
    taken = [core for share in shares for core in share.cores]
    sizes = [len(share.cores) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    if engines <= cores:
        assert taken == list(range(cores))
    else:
        assert set(taken) == set(range(cores))
        assert sizes == [1] * engines


def test_one_engine_on_a_cpu_chooses_its_cores_itself() -> None:
    assert plan_devices(Machine((), CORES), None).shares == (DeviceShare(),)
    assert str(plan_devices(Machine((), CORES), None, 2, 2)) == "2 engines on the CPU, each of 2 ranks"


@pytest.mark.parametrize(
    ("machine", "model", "flags", "text"),
    [
        # Qwen3-8B in bf16 on eight H100s, on eight cards of 16 GB, and on one of 24 GB
        (gpus(8), ModelNeeds(16_400_000_000, 32), (0, 0), "8 engines on 1 GPU each (0 | 1 | 2 | 3 | 4 | 5 | 6 | 7)"),
        (gpus(8, 16 * GB), ModelNeeds(16_400_000_000, 32), (0, 0), "4 engines on 2 GPUs each (0,1 | 2,3 | 4,5 | 6,7)"),
        (gpus(1, 24 * GB), ModelNeeds(16_400_000_000, 32), (0, 0), "1 engine on 1 GPU (0)"),
        # Llama-3.3-70B on eight H100s
        (gpus(8), ModelNeeds(141 * GB, 64, 43 * GB, 8), (0, 0), "2 engines on 4 GPUs each (0,1,2,3 | 4,5,6,7)"),
        (gpus(3), ModelNeeds(100 * GB, 40), (0, 0), "1 engine on 2 GPUs (0,1); idle: 2"),
        (gpus(4), ModelNeeds(16 * GB, 32), (1, 0), "1 engine on 1 GPU (0); idle: 1, 2, 3"),
        (gpus(4), ModelNeeds(16 * GB, 32), (0, 2), "2 engines on 2 GPUs each (0,1 | 2,3)"),
        (gpus(4), None, (2, 2), "2 engines on 2 GPUs each (0,1 | 2,3)"),
        # A tp that is no power of two, where the user asks for it
        (gpus(3), ModelNeeds(16 * GB, 36), (0, 3), "1 engine on 3 GPUs (0,1,2)"),
    ],
)  # fmt: skip
def test_usual_machines(machine: Machine, model: ModelNeeds | None, flags: tuple[int, int], text: str) -> None:
    assert str(plan_devices(machine, model, *flags)) == text


@pytest.mark.parametrize(
    ("machine", "model", "flags", "sentence"),
    [
        (gpus(2), None, (3, 0), r"--engines 3: this machine has 2 GPUs that this process may use"),
        (gpus(2), None, (2, 2), r"--engines 2 --tp 2: this machine has 2 GPUs"),
        (gpus(1), None, (0, 2), r"--tp 2: this machine has 1 GPU that"),
        (gpus(8), ModelNeeds(16 * GB, 28), (0, 8), r"--tp 8: the model has 28 attention heads, which 8 ranks cannot"),
        (Machine((), CORES), ModelNeeds(16 * GB, 9), (0, 2), r"--tp 2: the model has 9 attention heads"),
        (gpus(2), ModelNeeds(400 * GB, 64), (0, 0), r"400\.0 GB.*each of 2 GPUs, which may take 72\.0 GB.*--tp"),
        (gpus(8), ModelNeeds(141 * GB, 64), (8, 0), r"the GPU, which may take 72.*choose fewer --engines"),
        (gpus(2), ModelNeeds(400 * GB, 64), (0, 2), r"--tp 2: .* 200\.0 GB for each of 2 GPUs.*larger --tp"),
    ],
)  # fmt: skip
def test_the_impossible_is_refused_in_a_sentence(
    machine: Machine, model: ModelNeeds | None, flags: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        plan_devices(machine, model, *flags)


def test_a_tp_that_leaves_little_for_the_cache_is_the_users_choice() -> None:
    tight = ModelNeeds(70 * GB, 32)
    assert plan_devices(gpus(2), tight, 0, 1).ranks == 1
    assert plan_devices(gpus(2), tight).ranks == 2
    assert 70 * GB > (USED_SHARE - CACHE_SHARE) * 80 * GB


QWEN3_8B = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36, "hidden_size": 4096, "head_dim": 128,
    "max_position_embeddings": 40960,
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 163840,
}  # fmt: skip


def test_keys_and_values_are_reckoned_by_the_config() -> None:
    assert needs_of(7, QWEN3_8B) == ModelNeeds(7, 32, 40960 * 36 * 8 * 128 * 2 * 2, 8)
    assert needs_of(7, {"text_config": QWEN3_8B, "model_type": "qwen3_vl"}) == needs_of(7, QWEN3_8B)
    assert needs_of(7, QWEN3_8B, 1024).cache_bytes == 1024 * 147456
    assert needs_of(7, DEEPSEEK_V3) == ModelNeeds(7, 128, 163840 * 61 * 576 * 2, 1)
    assert needs_of(7, QWEN3_8B | {"head_dim": None}).cache_bytes == needs_of(7, QWEN3_8B).cache_bytes
    long = needs_of(16 * GB, QWEN3_8B | {"max_position_embeddings": 1 << 20})
    assert plan_devices(gpus(8), long).ranks == 4, "154 GB of keys and values for one sequence"


@pytest.mark.parametrize(
    "config", [{}, {"num_attention_heads": "32"}, {"text_config": 5}, QWEN3_8B | {"hidden_size": 0}]
)
def test_a_config_that_says_nothing_is_not_reckoned_with(config: dict[str, object]) -> None:
    assert needs_of(7, config).cache_bytes == 0


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner) | (
    st.dictionaries(st.sampled_from([*DEEPSEEK_V3, "text_config", "head_dim"]), inner)), max_leaves=12))  # fmt: skip
def test_no_config_is_too_strange(found: object) -> None:
    if isinstance(found, dict):
        needs = needs_of(7, found)
        assert needs.cache_bytes >= 0
        assert needs.cache_parts >= 1


def test_a_driver_reads_its_share_from_its_flags() -> None:
    assert share_of("3,GPU-5b", "") == DeviceShare(("3", "GPU-5b"))
    assert share_of("", "4,5") == DeviceShare((), (4, 5))
    assert share_of("", "") == DeviceShare()
