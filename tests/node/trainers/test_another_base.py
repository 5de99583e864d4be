"""An adapter that was trained on another base of the same shapes is refused, wherever this process has that base."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_kit import BASE, LoraLinear, adapter, adapters_of, base_weights, saved, seed_with_slots
from safetensors.torch import save_file
from seed_kit import running

from codec.errors import UsageError
from node import Swarm
from node.trainers.publish_adapter import publish_adapter

OTHER = "of another base: of 128 weights of its base"


def model(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A model with adapters on that base."""
    root, layers, layer = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    layer.add_module("down", LoraLinear(weights["layers.0.down.weight"]))
    layer.add_module("up", LoraLinear(weights["layers.0.up.weight"]))
    layers.add_module("0", layer)
    root.add_module("layers", layers)
    return root


def other_weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    return {spec.name: torch.randn(spec.shape, generator=random).to(torch.bfloat16) for spec in BASE.tensors}


def named(source: tuple[dict[str, Any], dict[str, torch.Tensor]], folder: Path) -> Any:
    return source[0] | {"base_model_name_or_path": str(folder)}, source[1]


def checkpoint(folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def test_a_model_on_another_base_is_refused_and_one_on_a_later_version_is_not(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as swarm:
        with pytest.raises(UsageError, match=OTHER):
            swarm.publish(model(other_weights()), step=1, adapter="a")
        assert adapters_of(there.seed) == {}
        swarm.publish(model(base_weights(9)), step=1, adapter="b").wait(timeout_s=30)
        assert adapters_of(there.seed)["b"][1].version == 1


def test_a_base_that_cannot_be_compared_is_not_refused(tmp_path: Path) -> None:
    quantized = model(other_weights())
    for name in ("down", "up"):
        weight = quantized.get_submodule(f"layers.0.{name}.base_layer").weight
        weight.data = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as swarm:
        swarm.publish(quantized, step=1, adapter="a").wait(timeout_s=30)
        assert adapters_of(there.seed)["a"][1].version == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_folder_that_a_config_names_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    own = {name: weight.nan_to_num(0, 0, 0) for name, weight in base_weights(2).items()}
    right, wrong = checkpoint(tmp_path / "right", own, dtype), checkpoint(tmp_path / "wrong", other_weights(), dtype)
    home = tmp_path / "home"
    home.mkdir()
    with running(home, seed_with_slots()) as there:
        with pytest.raises(UsageError, match=OTHER):
            publish_adapter(home, saved(tmp_path / "adapter-1", named(adapter(1), wrong)), "a")
        publish_adapter(home, saved(tmp_path / "adapter-2", named(adapter(2), right)), "b")
        publish_adapter(home, saved(tmp_path / "adapter-3", named(adapter(3), tmp_path / "gone")), "c")
        found = adapters_of(there.seed)
    assert {name: config.version for name, (_, config) in found.items()} == {"b": 1, "c": 1}
    assert np.isfinite(own["layers.0.up.weight"].float().numpy()).all()
