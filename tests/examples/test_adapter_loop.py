"""The example that trains a LoRA adapter by GRPO, with the adapter published as such, over a real seed and node."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scenarios.harness.swarm import STARTED_WITHIN_S, swarm_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(find_spec("torch") is None or find_spec("peft") is None, reason="needs torch and peft"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora_grpo.py"
STEPS = 3


def make_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def test_every_step_is_drawn_by_the_adapter_and_published_as_one(tmp_path: Path) -> None:
    make_llama(base := tmp_path / "base")
    with swarm_in(tmp_path, patience_s=STARTED_WITHIN_S) as swarm:
        swarm.seed(base, "--adapters", "2", "--adapter-rank", "8")
        before = swarm.seed_status().root
        swarm.engines(["node"], base, "--engine", "transformers", "--threads", "1")
        words = ["--base", str(base), "--home", str(swarm.home("seed")), "--steps", str(STEPS), "--max-tokens", "16"]
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), *words, "--adapter", "math"],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:] + swarm.log("node")
        assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step")] == ["1", "2", "3"]
        (row,) = swarm.json("seed", "adapters")["adapters"]
        assert (row["name"], row["version"], row["rank"], row["modules"]) == ("math", STEPS + 1, 8, 4)
        head = swarm.until("seed", lambda state: state["nodes"][0]["held"] == [0, STEPS + 1])
        assert swarm.state("node")["nodes"][0]["root"] == head["root"] != before
