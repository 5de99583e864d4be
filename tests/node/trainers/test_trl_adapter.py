"""What TRL calls in a LoRA run, without TRL: the adapter is published, and its rollout worker asks for the adapter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from adapter_kit import BASE, LoraLinear, assert_adapter, base_weights, seed_with_slots  # noqa: E402
from seed_kit import running  # noqa: E402

from codec.errors import UsageError  # noqa: E402
from node import Swarm  # noqa: E402
from node.trainers.trl import SwarmWeights  # noqa: E402


def model() -> Any:
    """Of the base of `adapter_kit`, wrapped as DistributedDataParallel and peft name it."""
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    layer = torch.nn.Module()
    base = base_weights(0)
    layer.down, layer.up = LoraLinear(base["layers.0.down.weight"]), LoraLinear(base["layers.0.up.weight"])
    wrapped.module.layers = torch.nn.ModuleList([layer])
    return wrapped


def tensors_of(trained: Any) -> dict[str, Any]:
    found = {}
    for name, layer in trained.module.layers[0].named_children():
        for matrix, held in (("A", layer.lora_A), ("B", layer.lora_B)):
            found[f"base_model.model.layers.0.{name}.lora_{matrix}.weight"] = held["default"].weight.data
    return found


def test_a_lora_run_publishes_the_adapter(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()) as there, Swarm.attach(home=tmp_path) as swarm:
        trained, worker = model(), SimpleNamespace(_loop_kwargs={"model_name": "the/base"})
        weights = SwarmWeights(swarm, adapter="math", quorum=0.1)
        with pytest.raises(UsageError, match="follow"):
            weights.send_weights(iter(()))
        weights.follow(SimpleNamespace(model=trained, rollout_worker=worker))
        assert worker._loop_kwargs["model_name"] == "math"
        for version in (1, 2):
            streamed: list[str] = []
            merged = ((spec.name, streamed.append(spec.name)) for spec in BASE.tensors)
            weights.pause()
            weights.send_weights(merged)
            weights.resume()
            assert len(streamed) == len(BASE.tensors), "other ranks gather what is streamed, so all of it is taken"
            assert_adapter(there.seed, "math", version, (None, tensors_of(trained)))
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.01)
        weights.destroy()
        assert weights.publication is not None
        assert weights.publication.adapter_version == 2


def test_without_an_adapters_name_the_worker_asks_for_the_base(tmp_path: Path) -> None:
    with running(tmp_path, seed_with_slots()), Swarm.attach(home=tmp_path) as swarm:
        worker = SimpleNamespace(_loop_kwargs={"model_name": "the/base"})
        SwarmWeights(swarm).follow(SimpleNamespace(model=model(), rollout_worker=worker))
        assert worker._loop_kwargs["model_name"] == "the/base"
