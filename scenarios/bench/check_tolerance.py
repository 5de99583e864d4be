"""Measures how far log-probabilities differ between honest nodes, and from a dishonest one. Spot checks rely on this.

    python -m scenarios.bench.check_tolerance            (--json for programs)
    python -m scenarios.bench.check_tolerance --vllm     a vLLM for CPUs draws and scores, too
    python -m scenarios.bench.check_tolerance --temperature 0.8 --top-p 0.9

A small random model draws samples token by token. Each sample is then scored in one pass: in the same arithmetic, in
the other one (float32 or bfloat16), under a later version (a step that moves the share `--changed` of the bf16 values
by one unit in the last place), and under another model. The table has the mean and the largest difference per token, in
nats; an impossible token counts as 10, as in a check. When a commit falls into a sample of vLLM, the tokens drawn after
it, from keys and values of the older version, are scored under the newer version.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from codec import Checkpoint
from node.engines.base import Completion, Prompt, SamplingParams
from node.engines.transformers import Arithmetic, TransformersEngine
from node.ledger.trust.checks import distance
from node.settings.logs import configure
from scenarios.engines.engine_bench import Bench, bench
from scenarios.engines.engine_models import make_tokenizer, step_of
from scenarios.engines.vllm_environment import vllm_python
from scenarios.harness.command import json_parser

PROMPTS = 32
CROSSING_TOKENS = 400
"""Length of samples during which a commit is made."""

Score = Callable[[Sequence[int], Sequence[int], SamplingParams], tuple[float, ...]]
Drawn = list[tuple[Prompt, Completion]]


def make(folder: Path, seed: int) -> Path:
    """Write a model of 2 million parameters. Its next-token entropy (2 nats) is about that of a language model."""
    config = Qwen3Config(
        vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.14,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    make_tokenizer(folder, 512)
    return folder


def stepped(base: Path, folder: Path, share: float) -> Path:
    """Write `base` after a step that moved this share of its values to a neighbouring bf16 value."""
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
    loaded = TransformersEngine(device="cpu", arithmetic=arithmetic)
    loaded.load(folder)
    loaded.attach(Checkpoint.open(folder).layout)
    return loaded


def row(
    drawn: str, scored: str, score: Score, samples: Drawn, sampling: SamplingParams, cut: int = 0
) -> dict[str, Any]:
    """Return the mean and the largest distances of the tokens from index `cut` on, computed as a check does."""
    pairs = [(score(p.token_ids, s.token_ids, sampling)[cut:], s.logprobs[cut:]) for p, s in samples]
    tokens = [distance((a,), (b,)) for found, claimed in pairs for a, b in zip(claimed, found, strict=True)]
    return {
        "drawn": drawn,
        "scored": scored,
        "mean": float(np.mean(tokens)),
        "worst_sample": max(distance(claimed, found) for found, claimed in pairs),
        "worst_token": max(tokens),
    }


def measure(changed: float, sampling: SamplingParams, vllm: bool) -> list[dict[str, Any]]:
    """Return one row per case: what drew, what scored, the mean, the largest mean of a sample, and of a token."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        base, other = make(work / "base", 1), make(work / "other", 2)
        next_one = stepped(base, work / "next", changed)
        rng = np.random.default_rng(0)
        prompts = [Prompt(tuple(rng.integers(0, 512, 8).tolist()), i) for i in range(PROMPTS)]
        kinds: tuple[Arithmetic, ...] = ("float32", "bfloat16")
        same: dict[str, Score] = {f"the same, {kind}": engine(base, kind).score for kind in kinds}
        lies = {"another model": engine(other, "bfloat16").score}
        rows = []
        with _vllm_of(base, work, vllm) as live:
            for drawn in kinds:
                samples = list(zip(prompts, engine(base, drawn).generate(prompts, sampling), strict=True))
                late = {"one version later": engine(next_one, drawn).score}
                theirs: dict[str, Score] = {"the same, vLLM": live.score} if live is not None else {}
                for scorer, score in (same | theirs | late | lies).items():
                    rows.append(row(drawn, scorer, score, samples, sampling))
            if live is not None:
                rows += _of_vllm(live, same | lies, prompts, sampling, changed)
        return rows


@contextlib.contextmanager
def _vllm_of(base: Path, work: Path, wanted: bool) -> Iterator[Bench | None]:
    if not wanted:
        yield None
        return
    with bench(base, work / "vllm", vllm_python()) as live:
        yield live


def _of_vllm(
    live: Bench, others: dict[str, Score], prompts: list[Prompt], sampling: SamplingParams, changed: float
) -> list[dict[str, Any]]:
    samples = list(zip(prompts, live.generate(prompts, sampling), strict=True))
    rows = [
        row("vLLM", scorer, score, samples, sampling)
        for scorer, score in ({"the same, vLLM": live.score} | others).items()
    ]
    live.update(step_of(live.replica, 7, changed))
    rows.append(row("vLLM", "one version later", live.score, samples, sampling))
    long = SamplingParams(CROSSING_TOKENS, sampling.temperature, sampling.top_p, sampling.seed)
    flight = live.begin(prompts, long)
    while not min(live.engine.counts().get(live.flights, [CROSSING_TOKENS])):
        time.sleep(0.01)
    live.update(step_of(live.replica, 8, changed))
    crossed = [(p, s) for p, s in zip(prompts, flight.result(600), strict=True) if len(s.spans) == 2]
    for cut in sorted({s.spans[0].end for _, s in crossed}):
        some = [(p, s) for p, s in crossed if s.spans[0].end == cut]
        rows.append(row("vLLM, stale keys", f"vLLM, tokens from {cut} on", live.score, some, sampling, cut))
    return rows


def main() -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--changed", type=float, default=0.01, help="share of values that a step moves")
    parser.add_argument("--tokens", type=int, default=64, help="length of each sample (default 64)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--vllm", action="store_true", help="also use a vLLM for CPUs, which is installed if missing")
    given = parser.parse_args()
    configure("warning")
    torch.set_num_threads(1)
    sampling = SamplingParams(given.tokens, given.temperature, given.top_p, seed=3)
    rows = measure(given.changed, sampling, given.vllm)
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'drawn in':18} {'scored by':26} {'mean':>10} {'worst sample':>14} {'worst token':>13}  nats a token")
    for line in rows:
        print(
            f"{line['drawn']:18} {line['scored']:26} {line['mean']:10.2e} {line['worst_sample']:14.2e} "
            f"{line['worst_token']:13.2e}"
        )


if __name__ == "__main__":
    main()
