"""Which tensors a format quantises, and what it stores of them."""

import subprocess
import sys

import pytest

from codec.errors import UsageError
from codec.formats.spec import (
    FORMATS,
    Format,
    format_named,
    format_ratio,
    format_tensors,
    is_quantised,
    quantised,
    unquantised,
)
from codec.layout import Layout, TensorSpec

QUANTISED = [
    ("model.layers.0.self_attn.q_proj.weight", (256, 128)),
    ("model.layers.0.mlp.gate_proj.weight", (256, 128)),
    ("model.layers.0.mlp.experts.3.down_proj.weight", (256, 128)),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 256, 128)),
    ("model.layers.0.mlp.experts.w1.weight", (4, 256, 128)),
    ("model.layers.0.mlp.shared_expert.up_proj.weight", (256, 128)),
]
KEPT = [
    ("model.embed_tokens.weight", (256, 128)),
    ("lm_head.weight", (256, 128)),
    ("model.layers.0.mlp.gate.weight", (256, 128)),
    ("model.layers.0.mlp.shared_expert_gate.weight", (1, 128)),
    ("model.layers.0.input_layernorm.weight", (128,)),
    ("model.layers.0.self_attn.q_proj.bias", (256,)),
    ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 256)),
    ("model.layers.0.conv1d.weight", (256, 1, 4)),
    ("model.layers.0.conv1d.weight", (256, 4)),
    ("visual.patch_embed.proj.weight", (256, 588)),
    ("model.layers.0.A_log", (256, 16)),
    ("~_draft/model.layers.0.q_proj.weight", (256, 128)),
]


@pytest.mark.parametrize(("name", "shape"), QUANTISED)
def test_weights_of_linear_layers_are_quantised(name: str, shape: tuple[int, ...]) -> None:
    assert is_quantised(TensorSpec(name, "BF16", shape))
    assert not is_quantised(TensorSpec(name, "F32", shape))
    assert not is_quantised(TensorSpec(name, "BF16", (*shape[:-1], 0)))
    assert not is_quantised(TensorSpec(name, "BF16", shape, ("tied",)))


@pytest.mark.parametrize(("name", "shape"), KEPT)
def test_all_others_stay_as_they_are(name: str, shape: tuple[int, ...]) -> None:
    assert not is_quantised(TensorSpec(name, "BF16", shape))


def base() -> Layout:
    tensors = [TensorSpec(name, "BF16", shape) for name, shape in {**dict(KEPT), **dict(QUANTISED)}.items()]
    return Layout(tuple(sorted(tensors, key=lambda tensor: tensor.name)))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_format_stores_two_tensors_for_each_that_it_quantises(form: Format) -> None:
    tensors = format_tensors(base(), form)
    assert [tensor.name for tensor in tensors] == sorted(tensor.name for tensor in tensors)
    assert len(tensors) == 2 * len(quantised(base(), form)) == 2 * len(QUANTISED)
    assert len(unquantised(base())) == len(base().tensors) - len(QUANTISED)
    by_name = {tensor.name: tensor for tensor in tensors}
    codes = by_name[f"~format/{form.name}/model.layers.0.mlp.experts.gate_up_proj/codes"]
    scales = by_name[f"~format/{form.name}/model.layers.0.mlp.experts.gate_up_proj/scales"]
    assert codes.shape == (4, 256, 64 if form.element == "int4" else 128)
    assert scales.shape == ((4, 2, 1) if form.name.startswith("fp8-block") else (4, 256, 1))


def test_what_a_holder_of_int4_holds() -> None:
    linear = Layout((TensorSpec("a.weight", "BF16", (4096, 4096)),))
    assert format_ratio(linear, FORMATS["int4-group-e8"]) == pytest.approx((0.5 + 1 / 128) / 2)
    assert format_ratio(linear, FORMATS["int4-group"]) == pytest.approx((0.5 + 4 / 128) / 2)


def test_an_unknown_format_is_answered_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"no format 'int3': take one of fp8-block, fp8-block-e8, .*int4-group-e8"):
        format_named("int3")


def test_a_model_without_linear_layers_has_no_format() -> None:
    with pytest.raises(UsageError, match="nothing to quantise"):
        format_tensors(Layout((TensorSpec("a.bias", "BF16", (4,)),)), FORMATS["fp8-block"])


def test_a_relay_that_knows_formats_loads_no_numpy() -> None:
    code = "import sys, codec.formats.share; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
