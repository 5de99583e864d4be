"""LoRA is published merged, bit for bit as peft merges it, and the model that trains is not touched."""

import copy

import pytest

torch = pytest.importorskip("torch")
from codec.errors import UsageError  # noqa: E402
from node.trainers.tensors.adapters import has_adapters, merged  # noqa: E402

SCALING = 16 / 6**0.5
"""A scaling as rsLoRA's: not a power of two, so that it matters whether it is applied before or after rounding."""


class LoraLinear(torch.nn.Module):
    """A plain LoRA layer in peft's shape."""

    def __init__(self, base_layer: torch.nn.Linear, rank: int, kind: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = torch.nn.ModuleDict(
            {"default": torch.nn.Linear(base_layer.in_features, rank, bias=False, dtype=kind)}
        )
        self.lora_B = torch.nn.ModuleDict(
            {"default": torch.nn.Linear(rank, base_layer.out_features, bias=False, dtype=kind)}
        )
        self.scaling = {"default": SCALING}

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]


class Model(torch.nn.Module):
    def __init__(self, kind: torch.dtype = torch.float32, adapters: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = LoraLinear(torch.nn.Linear(96, 64, dtype=kind), 8, adapters)
        self.norm = torch.nn.LayerNorm(64, dtype=kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_merged_beside_the_model(kind: torch.dtype, adapters: torch.dtype):
    model = Model(kind, adapters)
    before = copy.deepcopy(model.state_dict())
    found = dict(merged(model))
    assert set(found) == {"q_proj.weight", "q_proj.bias", "norm.weight", "norm.bias"}
    layer = model.q_proj
    b, a = layer.lora_B["default"].weight.detach(), layer.lora_A["default"].weight.detach()
    product = ((b.float() @ a.float()) * SCALING).to(adapters)
    expected = layer.base_layer.weight.detach().clone()
    expected += product  # in place, as peft does
    assert torch.equal(found["q_proj.weight"], expected)
    assert found["q_proj.weight"].dtype is kind
    assert not torch.equal(expected, layer.base_layer.weight)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_adapters_are_refused():
    model = Model()
    model.q_proj.use_dora = {"default": True}
    with pytest.raises(UsageError, match="not plain LoRA"):
        dict(merged(model))
    assert not has_adapters(torch.nn.Linear(2, 2))


def test_adapters_that_are_not_merged_yet_are_added():
    """The result equals peft's `merge_and_unload`. Regression: the second adapter was left out."""
    model = Model()
    layer = model.q_proj
    weight = layer.base_layer.weight.detach().clone()
    layer.merged, layer.merged_adapters, layer.active_adapters = True, ["another"], ["another", "default"]
    layer.lora_A["another"], layer.lora_B["another"] = layer.lora_A["default"], layer.lora_B["default"]
    b, a = layer.lora_B["default"].weight.detach(), layer.lora_A["default"].weight.detach()
    assert torch.equal(dict(merged(model))["q_proj.weight"], weight + (b @ a) * SCALING)
    layer.merged_adapters = ["another", "default"]
    assert torch.equal(dict(merged(model))["q_proj.weight"], weight)
