"""Attention sinks of which vLLM's attention for CPUs makes a copy."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from node.engines.vllm.plugin.swarm_vllm.sinks import follow_sinks  # noqa: E402


class Attention:
    """As vLLM's: at its first step it puts a copy in the place of sinks that its kernel cannot read."""

    def __init__(self, sinks: Any) -> None:
        self.sinks = sinks

    def step(self) -> list[float]:
        if self.sinks.dtype not in (torch.bfloat16, torch.float32):
            self.sinks = self.sinks.to(torch.float32)
        return self.sinks.tolist()


class Model(torch.nn.Module):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype), requires_grad=False)
        self.attention = torch.nn.Module()
        self.attention.impl = Attention(self.sinks)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stepped", [False, True])
def test_each_step_reads_the_parameter(dtype: Any, stepped: bool) -> None:
    model = Model(dtype)
    attention = model.attention.impl
    if stepped:
        attention.step()
    follow_sinks(model)
    assert attention.step() == [1.0, 2.0]
    model.sinks.data.copy_(torch.tensor([3.0, 4.0]))
    assert attention.step() == [3.0, 4.0]
    model.sinks = torch.nn.Parameter(torch.tensor([5.0, 6.0], dtype=dtype), requires_grad=False)
    assert attention.step() == ([5.0, 6.0] if dtype == torch.float16 else [3.0, 4.0])
