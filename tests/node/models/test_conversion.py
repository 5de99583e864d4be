"""Where a checkpoint's tensors are in a model. A conversion that cannot be proven is refused with the tensor's name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from codec import Checkpoint, Layout, TensorSpec
from codec.errors import UsageError
from node.models.conversion import Conversion, conversion_of
from node.models.pieces import Piece


def mixture() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_experts=3,
        num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def bits_at(model: Any, conversion: Conversion, spec: TensorSpec) -> np.ndarray:
    """A checkpoint's tensor, read from the places that the conversion gives."""
    state, out = model.state_dict(), torch.full(spec.shape, -1, dtype=torch.int16)
    for place in conversion.places[spec.name]:
        piece: Piece = place.piece
        ends = zip(piece.start, piece.shape, strict=True)
        box = state[place.param].view(torch.int16)[tuple(slice(start, start + size) for start, size in ends)]
        out.as_strided(piece.shape, piece.strides, piece.offset).copy_(box)
    return out.reshape(-1).numpy().view(np.uint16)


def test_each_expert_is_found_in_the_fused_parameter(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    conversion = conversion_of(loaded, checkpoint.layout)
    for spec in checkpoint.layout.tensors:
        np.testing.assert_array_equal(bits_at(loaded, conversion, spec), checkpoint.bits(spec.name), spec.name)
    fused = [spec.name for spec in checkpoint.layout.tensors if conversion.plain(spec) is None]
    assert len(fused) == 9
    assert all(".experts." in name for name in fused)


def test_experts_that_are_stored_fused_are_found(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path, save_original_format=False)
    layout = Checkpoint.open(tmp_path).layout
    conversion = conversion_of(model, layout)
    assert all(conversion.plain(spec) is not None for spec in layout.tensors)
    assert any(name.endswith("experts.gate_up_proj") for name in conversion.places)


def test_an_old_checkpoint_with_other_prefixes_and_masks(tmp_path: Path) -> None:
    """The first GPT-2 folders have no `transformer.` before their names, and a mask in each layer."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    specs = [TensorSpec("h.0.attn.bias", "F32", (1, 1, 8, 8))]
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            specs.append(TensorSpec(name.removeprefix("transformer."), "F32", tuple(tensor.shape)))
    conversion = conversion_of(model, Layout(tuple(sorted(specs, key=lambda spec: spec.name))))
    assert conversion.unused == {"h.0.attn.bias"}
    assert conversion.plain(TensorSpec("wte.weight", "F32", (40, 16))) == "transformer.wte.weight"


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path)
    layout = Checkpoint.open(tmp_path).layout
    more = Layout(tuple(sorted((*layout.tensors, TensorSpec("model.more", "F32", (3,))), key=lambda spec: spec.name)))
    with pytest.raises(UsageError, match=r"model\.more"):
        conversion_of(model, more)
    other = [TensorSpec(s.name, s.dtype, (16,) if s.name.endswith("norm.weight") else s.shape) for s in layout.tensors]
    with pytest.raises(UsageError, match="in the checkpoint"):
        conversion_of(model, Layout(tuple(other)))
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UsageError, match="quantized"):
        conversion_of(model, layout)


def test_a_release_that_cannot_be_followed_is_matched_by_names_or_refused(monkeypatch, tmp_path: Path) -> None:
    """A model without converters is matched by names; a mixture of experts is refused."""
    import transformers.core_model_loading as loading

    def elsewhere(*_: Any) -> None:
        raise TypeError("takes other arguments")

    monkeypatch.setattr(loading, "convert_and_load_state_dict_in_model", elsewhere)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    for model, works in ((plain, True), (mixture(), False)):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        layout = Checkpoint.open(folder).layout
        if works:
            conversion = conversion_of(model, layout)
            assert all(conversion.plain(spec) == spec.name for spec in layout.tensors)
        else:
            with pytest.raises(UsageError, match="cannot be followed"):
                conversion_of(model, layout)


class Doubled(ConversionOps):
    """A loader that computes."""

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: tensors[0] * 2 for name, tensors in input_dict.items()}


class Twice(ConversionOps):
    """A loader that moves some elements to two places."""

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: torch.cat([t[0][:4], t[0][:4], t[0][8:]]) for name, t in input_dict.items()}


class DoublingMoe(Qwen3MoeForCausalLM):
    pass


class RepeatingMoe(Qwen3MoeForCausalLM):
    pass


@pytest.mark.parametrize(("kind", "how", "says"), [(DoublingMoe, Doubled, "moved"), (RepeatingMoe, Twice, "twice")])
def test_a_loader_that_does_more_than_move_elements_is_refused(kind: Any, how: Any, says: str, tmp_path: Path) -> None:
    model = kind(mixture().config)
    converter = WeightConverter("q_proj.weight", "q_proj.weight", operations=[how()])
    register_checkpoint_conversion_mapping(kind.__name__, [converter], overwrite=True)
    specs = [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in sorted(model.state_dict().items())]
    with pytest.raises(UsageError, match=says) as raised:
        conversion_of(model, Layout(tuple(specs)))
    assert "save_pretrained" in str(raised.value)
