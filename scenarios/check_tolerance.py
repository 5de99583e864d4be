"""How far apart two honest nodes' log-probabilities are, and how far a lie is: what spot checks go by.

    python -m scenarios.check_tolerance            (--json for programs)

A small random model draws samples token by token, and scores them in one pass: in the same arithmetic, in the other
one (float32 against bfloat16), under a later version (a step that moves `--changed` of the bf16 values by one unit in
the last place), and under another model altogether. Mean and largest difference a token, in nats.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from codec import Checkpoint
from node.engines.base import Prompt, SamplingParams
from node.engines.transformers import Arithmetic, TransformersEngine

PROMPTS = 32


def make(folder: Path, seed: int) -> Path:
    """A model of 2 million parameters whose next token is about as certain as a language model's (2 nats)."""
    config = Qwen3Config(
        vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=48, max_position_embeddings=256, initializer_range=0.14,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def stepped(base: Path, folder: Path, share: float) -> Path:
    """`base` after a step that moved this share of its values to the next bf16 value."""
    folder.mkdir()
    rng, tensors = np.random.default_rng(7), load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16).numpy().copy()
        bits[rng.random(bits.shape) < share] ^= 1
        tensors[name] = torch.from_numpy(bits).view(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


def engine(folder: Path, arithmetic: Arithmetic) -> TransformersEngine:
    made = TransformersEngine(device="cpu", arithmetic=arithmetic)
    made.load(folder)
    made.attach(Checkpoint.open(folder).layout)
    return made


def measure(changed: float, tokens: int) -> list[dict[str, Any]]:
    """One row a case: `drawn` by whom, `scored` by whom, mean, largest mean of a sample, and largest of a token."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        base, other = make(work / "base", 1), make(work / "other", 2)
        next_one = stepped(base, work / "next", changed)
        sampling = SamplingParams(tokens, seed=3)
        rng = np.random.default_rng(0)
        prompts = [Prompt(tuple(rng.integers(0, 512, 8).tolist()), i) for i in range(PROMPTS)]
        rows = []
        kinds: tuple[Arithmetic, ...] = ("float32", "bfloat16")
        for drawn in kinds:
            samples = engine(base, drawn).generate(prompts, sampling)
            cases = [(f"the same, {kind}", base, kind) for kind in kinds]
            cases += [("one version later", next_one, drawn), ("another model", other, drawn)]
            for what, folder, kind in cases:
                scorer = engine(folder, kind)
                apart = [
                    np.abs(np.subtract(scorer.score(p.token_ids, s.token_ids, sampling), s.logprobs))
                    for p, s in zip(prompts, samples, strict=True)
                ]
                rows.append(
                    {
                        "drawn": drawn,
                        "scored": what,
                        "mean": float(np.mean(apart)),
                        "worst_sample": max(float(one.mean()) for one in apart),
                        "worst_token": max(float(one.max()) for one in apart),
                    }
                )
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", type=float, default=0.01, help="share of values that a step moves")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(given.changed, given.tokens)
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'drawn in':10} {'scored by':22} {'mean':>10} {'worst sample':>14} {'worst token':>13}  nats a token")
    for row in rows:
        print(
            f"{row['drawn']:10} {row['scored']:22} {row['mean']:10.2e} {row['worst_sample']:14.2e} "
            f"{row['worst_token']:13.2e}"
        )


if __name__ == "__main__":
    main()
