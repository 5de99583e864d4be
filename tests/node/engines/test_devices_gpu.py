"""On a machine with a GPU: what torch sees of it, and that the memory of an engine that sleeps is free."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from node.engines.visible_gpus import ask_gpus
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, swarm_in

pytestmark = pytest.mark.gpu


def cuda_is_here() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not cuda_is_here():
        pytest.skip("needs a GPU that torch can use")


def test_each_gpu_is_seen_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    found = ask_gpus(Path(sys.executable))
    assert found.usable
    assert [gpu.nbytes for gpu in found.gpus] == [
        torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(ask_gpus(Path(sys.executable)).gpus) == 1


def test_the_gpus_memory_is_free_while_the_engine_sleeps(tmp_path: Path) -> None:
    import torch

    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    base = tmp_path / "base"
    save_bf16(random_model(TinyRecipe(vocabulary=20_000, hidden=1024, inner=2048, layers=8, seed=1)), base)
    free_at_first, _ = torch.cuda.mem_get_info()
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base)
        swarm.start("node", "join", swarm.ticket(), "--device", "cuda", *LOOPBACK, "--model", str(base))
        swarm.until("node", lambda state: state["nodes"][0].get("engine") == [0, 0], STARTED_WITHIN_S)
        free_awake, _ = torch.cuda.mem_get_info()
        assert free_at_first - free_awake > 100 << 20
        assert swarm.json("node", "sleep")["asleep"] is True
        free_asleep, _ = torch.cuda.mem_get_info()
        assert free_asleep - free_awake > 0.95 * (free_at_first - free_awake)
        assert swarm.json("node", "wake", "--timeout", "5m") == {"asleep": False, "ready": True}
