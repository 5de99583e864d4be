"""Generators on CPUs that go back to where they were before a step. Needs no vLLM."""

import sys
from types import ModuleType
from types import SimpleNamespace as Space
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


class Runner:
    """Draws a number for each request, and drops it as vLLM does where the prompt is not read to its end."""

    def __init__(self, generator: Any) -> None:
        self.input_batch = Space(num_reqs=1, generators={0: generator})
        self.discard_request_mask = Space(np=np.zeros(4, bool))

    def sample_tokens(self) -> float:
        generator = self.input_batch.generators[0]
        drawn = float(torch.empty(1).exponential_(generator=generator))
        if self.discard_request_mask.np[0]:
            generator.set_offset(generator.get_offset() - 4)
        return drawn


def test_a_dropped_token_takes_no_random_number(monkeypatch: pytest.MonkeyPatch):
    from node.engines.vllm.plugin.swarm_vllm import generators

    module = ModuleType("vllm.v1.worker.gpu_model_runner")
    module.__dict__.update(GPUModelRunner=Runner, CachedRequestState=lambda **named: Space(**named))
    worker = ModuleType("vllm.v1.worker")
    worker.__dict__.update(gpu_model_runner=module)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker", worker)
    for _ in range(2):
        generators.install()
    plain = torch.Generator().manual_seed(7)
    with pytest.raises(RuntimeError):
        plain.set_offset(0)
    state = module.CachedRequestState(generator=torch.Generator().manual_seed(7))
    assert module.CachedRequestState(generator=None).generator is None
    runner = Runner(state.generator)
    wanted = [float(torch.empty(1).exponential_(generator=plain)) for _ in range(4)]
    found = []
    for dropped in (True, True, False, False, True, False, False):  # it is preempted after its second token
        runner.discard_request_mask.np[0] = dropped
        drawn = runner.sample_tokens()
        if not dropped:
            found.append(drawn)
    assert found == wanted
