"""A mixture of experts, bf16 and f16, in a swarm of real processes: samples have the trainer's log-probabilities."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from scenarios.harness.swarm import LOOPBACK, swarm_in  # noqa: E402

PROMPTS = [[1, 5, 9, 12], [3, 4, 8, 20]]
STEPS = 3


def save(folder: Path, stored: Any) -> Path:
    """A model of four experts a layer: a tensor each in the checkpoint, one parameter in the model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, moe_intermediate_size=20, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(stored).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_three_steps_of_a_mixture_of_experts(tmp_path: Path, stored: Any) -> None:
    from transformers import AutoModelForCausalLM

    from node import SamplingParams, Swarm
    from node.status.query import ask

    base = save(tmp_path / "base", stored)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with swarm_in(tmp_path) as there:
        there.seed(base)
        there.start("node", "join", there.ticket(), "--engine", "transformers", "--threads", "1", *LOOPBACK)
        there.until("node", lambda state: state["nodes"][0].get("engine") == [0, 0], within_s=120.0)
        with Swarm.attach(model, home=there.home("seed")) as swarm:
            for step in range(STEPS):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.02)
                swarm.publish(model, step=step).wait(quorum=1.0, timeout_s=60)
                policy: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
                policy.load_state_dict({name: t.to(stored).float() for name, t in model.state_dict().items()})
                for group in swarm.rollouts(PROMPTS, n=2, sampling=SamplingParams(max_tokens=5), timeout_s=60):
                    for rollout in group.rollouts:
                        _check_logprobs(policy, list(group.prompt), rollout)
        state = there.until("node", lambda state: state["nodes"][0].get("engine") == [0, STEPS])
        assert state["nodes"][0].get("engine_reloads", 0) == 0, "every version was applied in place"
        assert ask(there.home("node"), prove=True).nodes[0].live_proven is True


def _check_logprobs(policy: Any, prompt: list[int], rollout: Any) -> None:
    ids = torch.tensor([[*prompt, *rollout.token_ids]])
    with torch.inference_mode():
        logits = policy(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(rollout.logprobs), wanted, atol=2e-4, rtol=0)
