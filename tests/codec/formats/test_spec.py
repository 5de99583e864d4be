"""Which tensors a format quantises, and what it stores of them."""

import subprocess
import sys
from typing import Any

import pytest

from codec.errors import UsageError
from codec.formats.spec import (
    FORMATS,
    Format,
    FormatTensor,
    format_named,
    format_ratio,
    format_tensors,
    is_quantised,
    quantised,
    unquantised,
)
from codec.layout import Layout, TensorSpec

TABLES = [
    ("model.embed_tokens.weight", (256, 128)),
    ("model.language_model.embed_tokens_per_layer.weight", (256, 512)),
    ("transformer.wte.weight", (256, 128)),
    ("tok_embeddings.weight", (256, 128)),
    ("lm_head.weight", (256, 128)),
    ("output.weight", (256, 128)),
]
QUANTISED = [
    ("model.layers.0.self_attn.q_proj.weight", (256, 128)),
    ("model.layers.0.mlp.gate_proj.weight", (256, 128)),
    ("model.layers.0.mlp.experts.3.down_proj.weight", (256, 128)),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 256, 128)),
    ("model.layers.0.mlp.experts.w1.weight", (4, 256, 128)),
    ("model.layers.0.mlp.shared_expert.up_proj.weight", (256, 128)),
]
KEPT = [
    ("model.embed_tokens", (256, 128)),
    ("transformer.wpe.weight", (256, 128)),
    ("score.weight", (2, 128)),
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


EVERY = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)


def quantises(form: Format, *spec: Any) -> bool:
    return is_quantised(TensorSpec(*spec), form)


@EVERY
@pytest.mark.parametrize(("name", "shape"), QUANTISED)
def test_weights_of_linear_layers_are_quantised(form: Format, name: str, shape: tuple[int, ...]) -> None:
    assert quantises(form, name, "BF16", shape)
    assert not quantises(form, name, "F32", shape)
    assert not quantises(form, name, "BF16", (*shape[:-1], 0))
    assert not quantises(form, name, "BF16", shape, ("tied.weight",))
    assert not quantises(form, name, "BF16", shape, ("lm_head.weight",))


@EVERY
@pytest.mark.parametrize(("name", "shape"), TABLES)
def test_int4_formats_hold_token_tables_as_int8(form: Format, name: str, shape: tuple[int, ...]) -> None:
    int4 = form.element == "int4"
    assert quantises(form, name, "BF16", shape) == int4
    assert quantises(form, name, "BF16", shape, ("lm_head.weight",)) == int4  # tied: one tensor with two names
    assert not quantises(form, name, "F32", shape)
    assert not quantises(form, name, "BF16", (*shape[:-1], 0))
    assert not quantises(form, name, "BF16", shape, ("lm_head.weight", "other.weight"))
    assert not quantises(form, f"~draft/{name}", "BF16", shape)
    if int4:
        tensor = FormatTensor(form, TensorSpec(name, "BF16", shape, ("lm_head.weight",)))
        assert tensor.form is FORMATS["int8-channel-e8" if form.powers else "int8-channel"]
        assert tensor.codes == TensorSpec(f"~format/{form.name}/{name}/codes", "I8", shape)
        scales = f"~format/{form.name}/{name}/scales"
        assert tensor.scales == TensorSpec(scales, form.scales_dtype, (shape[0], 1))


@EVERY
@pytest.mark.parametrize(("name", "shape"), KEPT)
def test_all_others_stay_as_they_are(form: Format, name: str, shape: tuple[int, ...]) -> None:
    assert not quantises(form, name, "BF16", shape)


def base() -> Layout:
    shapes = dict(KEPT) | dict(QUANTISED) | dict(TABLES)
    tensors = [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]
    return Layout(tuple(sorted(tensors, key=lambda tensor: tensor.name)))


@EVERY
def test_a_format_stores_two_tensors_for_each_that_it_quantises(form: Format) -> None:
    tensors = format_tensors(base(), form)
    assert [tensor.name for tensor in tensors] == sorted(tensor.name for tensor in tensors)
    count = len(QUANTISED) + (len(TABLES) if form.element == "int4" else 0)
    assert len(tensors) == 2 * len(quantised(base(), form)) == 2 * count
    assert len(unquantised(base(), form)) == len(base().tensors) - count
    by_name = {tensor.name: tensor for tensor in tensors}
    codes = by_name[f"~format/{form.name}/model.layers.0.mlp.experts.gate_up_proj/codes"]
    scales = by_name[f"~format/{form.name}/model.layers.0.mlp.experts.gate_up_proj/scales"]
    assert codes.shape == (4, 256, 64 if form.element == "int4" else 128)
    assert scales.shape == ((4, 2, 1) if form.name.startswith("fp8-block") else (4, 256, 1))


def test_what_a_holder_of_int4_holds() -> None:
    linear = Layout((TensorSpec("a.weight", "BF16", (4096, 4096)),))
    assert format_ratio(linear, FORMATS["int4-group-e8"]) == pytest.approx((0.5 + 1 / 128) / 2)
    assert format_ratio(linear, FORMATS["int4-group"]) == pytest.approx((0.5 + 4 / 128) / 2)
    table = Layout((*linear.tensors, TensorSpec("lm_head.weight", "BF16", (4096, 4096))))
    of_table = (1 + 1 / 4096) / 2
    assert format_ratio(table, FORMATS["int4-group-e8"]) == pytest.approx(((0.5 + 1 / 128) / 2 + of_table) / 2)


def test_an_unknown_format_is_answered_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"no format 'int3': take one of fp8-block, fp8-block-e8, .*int4-group-e8"):
        format_named("int3")


def test_a_model_without_linear_layers_has_no_format() -> None:
    with pytest.raises(UsageError, match="nothing to quantise"):
        format_tensors(Layout((TensorSpec("a.bias", "BF16", (4,)),)), FORMATS["fp8-block"])


def test_a_relay_that_knows_formats_loads_no_numpy() -> None:
    code = "import sys, codec.formats.share; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
