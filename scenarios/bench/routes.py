"""Measures the bytes a token that routes of experts take, and the speed of their coder.

`uniform`: every set of experts is as likely, in the shape of Qwen3-30B-A3B (8 of 128 experts in 48 layers). `skewed`:
routers with favourites in the same shape; `skewed, sticky`: which also like to choose again what the last token chose.
`trained`: the real routes of a small mixture of experts that was trained to sort letters, over sampled texts. `raw` is
a byte an id, `bound` is log2 C(n, k) bits a set, `zlib` compresses the raw bytes.

    python -m scenarios.bench.routes
    python -m scenarios.bench.routes --tokens 8000 --steps 500 --json
"""

import json
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.routes import RouteShape, decode_routes, encode_routes
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["main", "measure", "skewed", "trained"]

QWEN: Final = RouteShape(48, 8, 128)
"""Qwen3-30B-A3B."""


def skewed(rng: np.random.Generator, tokens: int, shape: RouteShape, spread: float, stay: float) -> NDArray[np.int64]:
    """Return made-up routes. `spread`: standard deviation of a router's preferences, in logits. `stay`: what the choice
    of the last token adds to an expert's logit."""
    favour = spread * rng.standard_normal((shape.layers, shape.experts))
    found = np.empty((tokens, shape.layers, shape.chosen), np.int64)
    bonus = np.zeros_like(favour)
    for token in found:
        token[:] = np.argsort(-(favour + bonus + rng.gumbel(size=favour.shape)), -1)[:, : shape.chosen]
        bonus[:] = 0
        np.put_along_axis(bonus, token, stay, -1)
    return found


def trained(tokens: int, steps: int) -> tuple[NDArray[np.int64], int]:
    """Return the routes of about `tokens` tokens of a model that was trained for `steps` steps, and its experts."""
    import torch

    from node.engines.base import Prompt, SamplingOptions, SamplingParams
    from node.engines.transformers import TransformersEngine
    from node.ledger.route_reader import Routed, read_sample
    from node.trainers.grpo.task import SortLetters
    from scenarios.rl.letter_experts import make_letter_experts

    torch.set_num_threads(1)  # its matrices are too small to divide
    with tempfile.TemporaryDirectory() as folder:
        base = make_letter_experts(Path(folder), layers=8, experts=32, chosen=4, hidden=64, letters=8, steps=steps)
        engine = TransformersEngine(threads=1, device="cpu")
        engine.load(base)
        rng, task = np.random.default_rng(0), SortLetters(8)
        texts = max(1, tokens // 40)
        prompts = [Prompt(prompt, i, True) for i, prompt in enumerate(task.prompts(0, texts, rng))]
        sampling = SamplingParams(32, seed=1, options=SamplingOptions(routes=True))
        found = []
        for prompt, one in zip(prompts, engine.generate(prompts, sampling), strict=True):
            routed = Routed(one.routes, one.prompt_routes, len(one.token_ids), (0, 0))
            found.append(read_sample([routed], 0, len(prompt.token_ids)))
        return np.concatenate(found).astype(np.int64), 32


def measure(name: str, ids: NDArray[np.int64], experts: int) -> dict[str, Any]:
    """Return one row of the table."""
    tokens, layers, chosen = ids.shape
    shape = RouteShape(layers, chosen, experts)
    encode_routes(ids[:2], experts)  # compiles
    started = time.perf_counter()
    data = encode_routes(ids, experts)
    encoded = time.perf_counter()
    back = decode_routes(data, shape, tokens)
    decoded = time.perf_counter()
    assert np.array_equal(back, np.sort(ids, -1))
    return {
        "routes": name,
        "tokens": tokens,
        "raw": layers * chosen,
        "zlib": len(zlib.compress(np.sort(ids, -1).astype(np.uint8).tobytes(), 9)) / tokens,
        "bound": shape.bits / 8,
        "coded": len(data) / tokens,
        "encode_tokens_s": tokens / (encoded - started),
        "decode_tokens_s": tokens / (decoded - encoded),
    }


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100, help="training steps of the small model")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = [
        measure("uniform", skewed(rng, options.tokens, QWEN, 0.0, 0.0), QWEN.experts),
        measure("skewed", skewed(rng, options.tokens, QWEN, 1.0, 0.0), QWEN.experts),
        measure("skewed, sticky", skewed(rng, options.tokens, QWEN, 1.0, 1.5), QWEN.experts),
        measure("trained", *trained(options.tokens, options.steps)),
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    print("bytes a token:    raw    zlib   bound   coded   encode, decode (tokens/s)")
    for row in rows:
        print(
            f"{row['routes']:<15} {row['raw']:>5} {row['zlib']:>7.1f} {row['bound']:>7.1f} {row['coded']:>7.1f}"
            f"   {row['encode_tokens_s']:,.0f}, {row['decode_tokens_s']:,.0f}"
        )
    return 0


if __name__ == "__main__":
    run_as_program(main)
