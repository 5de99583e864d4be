"""An adapter for publishing as such: the same bits from a model, from tensors and from peft's folder; or a refusal."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
from codec.adapter import AdapterConfig, AdapterSlots  # noqa: E402
from codec.checkpoint import Checkpoint  # noqa: E402
from codec.errors import PeerError, UsageError  # noqa: E402
from codec.layout import Layout  # noqa: E402
from node.trainers.tensors.adapter_slot import slot_bits, slot_config, tensors_in  # noqa: E402
from node.trainers.tensors.naming import Naming  # noqa: E402
from node.trainers.tensors.plain_lora import PlainLora, plain_lora, read_folder, tensors_of  # noqa: E402

TARGETS = ["q_proj", "down_proj"]


def base_model(hidden: int = 32) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: Any) -> Layout:
    folder = tmp_path_factory.mktemp("base")
    base_model().save_pretrained(folder)
    return Checkpoint.open(folder).layout


def adapted(**options: Any) -> Any:
    options = {"r": 4, "target_modules": TARGETS} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base_model(), peft.LoraConfig(**options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def of(model: Any, layout: Layout, name: str = "a") -> PlainLora:
    return plain_lora(model, name, Naming(layout).checkpoint_name)


def same(one: PlainLora, other: PlainLora) -> bool:
    pairs = list(zip(one.modules, other.modules, strict=True))
    return one.rslora == other.rslora and all(
        (a.name, a.alpha) == (b.name, b.alpha) and np.array_equal(a.a, b.a) and np.array_equal(a.b, b.b)
        for a, b in pairs
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_a_model_its_tensors_and_its_folder_give_the_same_slot(tmp_path: Path, layout: Layout, rslora: bool) -> None:
    pattern = {"layers.0.self_attn.q_proj": 2}
    model = adapted(rank_pattern=pattern, alpha_pattern={"down_proj": 7}, use_rslora=rslora)
    found = of(model, layout)
    assert [module.rank for module in found.modules] == [4, 2, 4, 4]
    assert [module.alpha for module in found.modules] == [7, 8, 7, 8]
    tensors = peft.get_peft_model_state_dict(model)
    assert same(found, plain_lora((model.peft_config["default"], tensors), "a", Naming(layout).checkpoint_name))
    model.save_pretrained(tmp_path)
    assert same(found, read_folder(tmp_path))
    assert same(found, plain_lora(str(tmp_path), "a", Naming(layout).checkpoint_name))

    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    assert same(found, plain_lora((model.peft_config["default"], arrays), "a", Naming(layout).checkpoint_name))
    assert same(found, plain_lora((found.peft, dict(tensors_of(found))), "a", Naming(layout).checkpoint_name))

    slots = AdapterSlots.reserve(layout, 2, 8)
    config = slot_config(found, "a", layout, slots)
    raw, weights = slot_bits(found, config, slots)
    assert AdapterConfig.from_bytes(raw.tobytes()) == config
    assert config.peft["rank_pattern"] == {"model.layers.0.self_attn.q_proj": 2}
    assert "base_model_name_or_path" not in config.peft, "the trainer's folders are nobody else's business"
    back = tensors_in(config, weights, layout)
    assert set(back) == set(tensors) == {name for name, _ in tensors_of(found)}
    for name, tensor in tensors.items():
        expected = tensor.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(back[name], expected), f"{name}: float32 masters are rounded as torch rounds them"
    used = sum(bits.size for bits in back.values())
    assert not weights[used:].any()


def test_the_slot_is_a_copy(layout: Layout) -> None:
    model = adapted().to(torch.bfloat16)
    found = of(model, layout)
    before = found.modules[0].a.copy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert np.array_equal(found.modules[0].a, before)


def test_of_several_adapters_the_one_of_this_name_else_the_active_one(layout: Layout) -> None:
    model = adapted()
    model.add_adapter("b", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert [module.rank for module in of(model, layout, "b").modules] == [2, 2]
    assert len(of(model, layout, "other").modules) == 4
    model.base_model.set_adapter(["default", "b"])
    with pytest.raises(UsageError, match="b, default"):
        of(model, layout, "other")


def test_a_scaling_that_was_set_by_hand(layout: Layout) -> None:
    model = adapted()
    model.base_model.model.model.layers[0].mlp.down_proj.scaling["default"] = 0.3
    assert of(model, layout).modules[0].alpha == 0.3 * 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_modules": ["embed_tokens"]}, "embedding"),
        ({"init_lora_weights": "olora"}, "changes the base too"),
        ({"layer_replication": [(0, 2), (0, 2)]}, "layer_replication"),
        ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, "target_parameters"),
    ],
)
def test_what_plain_lora_does_not_have_is_refused(
    layout: Layout, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    model = adapted(**options)
    with pytest.raises(UsageError, match="publish the model merged") as refused:
        of(model, layout)
    assert why in str(refused.value)
    if "embedding" not in why:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | options))
        (tmp_path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        with pytest.raises(UsageError) as refused:
            read_folder(tmp_path)
        assert why in str(refused.value)


def test_other_kinds_of_adapter(layout: Layout) -> None:
    model = peft.get_peft_model(base_model(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(UsageError, match="peft_type is IA3"):
        of(model, layout)
    with pytest.raises(UsageError, match="no LoRA layers"):
        of(base_model(), layout)
    with pytest.raises(UsageError, match="and not int"):
        plain_lora(3, "a", Naming(layout).checkpoint_name)


def test_half_precision_that_is_not_bfloat16(layout: Layout) -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.half()
    with pytest.raises(UsageError, match="float16, and adapters are published in bfloat16"):
        of(model, layout)
    with pytest.raises(UsageError, match="float64, and adapters are published in bfloat16"):
        plain_lora(({}, {"x.lora_A.weight": np.ones((1, 2)), "x.lora_B.weight": np.ones((2, 1))}), "a", lambda m: str)


def test_a_shard_is_no_adapter() -> None:
    class Sharded:
        shape, placements = (2, 4), ()

        def detach(self) -> Any:
            return self

    source = {}, {"x.lora_A.weight": Sharded(), "x.lora_B.weight": torch.ones(4, 2)}
    with pytest.raises(UsageError, match=r"x\.lora_A\.weight is sharded: gather the adapter"):
        plain_lora(source, "a", lambda module: str)


def test_another_base_and_too_little_room(layout: Layout) -> None:
    slots = AdapterSlots.reserve(layout, 2, 8)
    other = peft.get_peft_model(base_model(48), peft.LoraConfig(r=4, target_modules=TARGETS))
    with pytest.raises(UsageError, match=r"of another base: its model\.layers\.0\.mlp\.down_proj is 48 x 48"):
        slot_config(of(other, layout), "a", layout, slots)
    with pytest.raises(UsageError, match=r"--adapter-rank 16"):
        slot_config(of(adapted(r=16), layout), "a", layout, slots)
    with pytest.raises(UsageError, match="1 to 64 of the characters"):
        slot_config(of(adapted(), layout), "a b", layout, slots)
    config = slot_config(of(adapted(), layout), "a", layout, slots)
    with pytest.raises(PeerError, match="another model"):
        tensors_in(config, np.zeros(slots.elements, np.uint16), Layout(layout.tensors[:-1]))


@pytest.mark.parametrize(
    ("config", "weights", "why"),
    [
        (None, True, "save_pretrained wrote"),
        ("[]", True, "no JSON object"),
        ("{", True, "is not JSON"),
        ('{"peft_type": "LORA"}', False, "safe_serialization"),
        ('{"peft_type": "LORA"}', True, "adapts no linear layer"),
        ('{"peft_type": "LORA", "lora_alpha": 1e999}', True, "adapts no linear layer"),
    ],
)
def test_folders_that_are_no_adapter(tmp_path: Path, config: str | None, weights: bool, why: str) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    if weights:
        (tmp_path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UsageError, match=why):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        ({}, {"x.lora_A.weight": (2, 4)}, "only one of lora_A and lora_B"),
        ({}, {"x.lora_A.weight": (2, 4), "x.lora_B.weight": (4, 3)}, "ranks differ"),
        ({}, {"x.lora_A.weight": (2, 4, 1), "x.lora_B.weight": (4, 2)}, "not plain LoRA"),
        ({}, {"x.lora_E.weight": (2, 4)}, "not plain LoRA"),
        ({"lora_alpha": "8"}, {"x.lora_A.weight": (2, 4), "x.lora_B.weight": (4, 2)}, "not a number"),
        ({"alpha_pattern": {"(": 1}}, {"x.lora_A.weight": (2, 4), "x.lora_B.weight": (4, 2)}, "regular expression"),
    ],
)
def test_tensors_that_are_no_adapter(config: dict[str, Any], tensors: dict[str, tuple[int, ...]], why: str) -> None:
    source = config, {name: torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(UsageError, match=why):
        plain_lora(source, "a", lambda module: lambda name: name)
