"""What checks cost: the CPU seconds of a replay and of a reading in one pass, as multiples of drawing the same tokens.

The transformers engine draws eight samples of one prompt length together, replays them together and one by one, and
reads each in one pass, in turns and with one thread. So the load of the machine changes the seconds more than the
ratios.

    python -m scenarios.verification.cost                                        # SmolLM2-135M, downloaded once
    python -m scenarios.verification.cost --model ~/models/Qwen3-0.6B --arithmetic float32 --rounds 5 --json
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from codec.errors import UsageError
from node.engines.base import REPLAYS, Completion, Prompt, SamplingOptions, SamplingParams
from node.engines.judgement import Claim, Judgement
from scenarios.harness.command import json_parser, run_as_program

__all__ = ["WAYS", "measure"]

WAYS: Final = {
    "drawn": "drawn together",
    "replayed": "replayed together",
    "replayed_alone": "replayed one by one",
    "one_pass": "read in one pass, one by one",
}
TOGETHER: Final = 8
"""Samples: as many as an engine judges together."""


def _prompts(task: Any, seed: int) -> list[Prompt]:
    """`TOGETHER` prompts of one length: the commonest one."""
    texts = task.prompts(1, 8 * TOGETHER, np.random.default_rng(seed))
    commonest = statistics.mode(len(ids) for ids in texts)
    return [Prompt(ids, i) for i, ids in enumerate(texts) if len(ids) == commonest][:TOGETHER]


def _draw(engine: Any, prompts: list[Prompt], sampling: SamplingParams) -> list[Completion]:
    engine.begin(0, prompts, sampling)
    while not (done := engine.step()):
        pass
    return done[0][1]


def _judge(engine: Any, claims: Sequence[Claim]) -> None:
    for found in engine.judge(claims):
        if not isinstance(found, Judgement):
            raise UsageError(f"The engine cannot judge what it drew: {found}")


def measure(engine: Any, task: Any, *, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Medians over `rounds` rounds of the CPU seconds of `WAYS`, and of their ratios to drawing. An engine that does
    not replay on this machine has no numbers of replays."""
    sampling = SamplingParams(
        max_tokens=task.max_tokens,
        seed=seed,
        stop_tokens=task.stop_tokens,
        options=SamplingOptions(portable=True),
    )
    prompts = _prompts(task, seed)
    drawn = _draw(engine, prompts, sampling)
    claims = {
        replay: [
            Claim(prompt.token_ids, one.token_ids, sampling, prompt.stream, replay=replay)
            for prompt, one in zip(prompts, drawn, strict=True)
        ]
        for replay in (False, True)
    }

    def one_by_one(replay: bool) -> None:
        for claim in claims[replay]:
            _judge(engine, [claim])

    ways: dict[str, Callable[[], Any]] = {
        "drawn": lambda: _draw(engine, prompts, sampling),
        "one_pass": lambda: one_by_one(False),
    }
    if REPLAYS in engine.abilities:
        ways["replayed"] = lambda: _judge(engine, claims[True])
        ways["replayed_alone"] = lambda: one_by_one(True)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            began = time.process_time()
            run()
            seconds[way].append(time.process_time() - began)
    return {
        "samples": len(prompts),
        "tokens": sum(len(one.token_ids) for one in drawn),
        "prompt_tokens": len(prompts[0].token_ids),
        "cpu_s": {way: statistics.median(found) for way, found in seconds.items()},
        "ratio": {
            way: statistics.median(a / b for a, b in zip(found, seconds["drawn"], strict=True))
            for way, found in seconds.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--arithmetic", default="bfloat16", choices=("bfloat16", "float32"), help="default bfloat16")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken (default 5)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    from codec.checkpoint import Checkpoint
    from node.engines.transformers import TransformersEngine
    from node.trainers.grpo import SIZES
    from scenarios.verification.task import Sentences

    folder = options.model or SIZES["smollm2"].folder(lambda line: print(line, file=sys.stderr, flush=True))
    engine = TransformersEngine(threads=1, device="cpu", arithmetic=options.arithmetic)
    engine.load(folder)
    engine.attach(Checkpoint.open(folder).layout)
    engine.measure()
    found = measure(engine, Sentences.of(folder), rounds=options.rounds)
    if options.json:
        print(json.dumps({"scenario": "verification_cost", "model": folder.name, "rows": [found]}))
    else:
        print(_table(found))
    return 0


def _table(found: dict[str, Any]) -> str:
    lines = [
        f"{found['samples']} samples, {found['tokens']} tokens, prompts of {found['prompt_tokens']} tokens",
        f"{'the samples are':<30} {'CPU s':>7}   x drawing",
    ]
    for way, label in WAYS.items():
        if way in found["ratio"]:
            lines.append(f"{label:<30} {found['cpu_s'][way]:>7.2f}   {found['ratio'][way]:>9.2f}")
    if "replayed" not in found["ratio"]:
        lines.append("This engine does not replay on this machine.")
    return "\n".join(lines)


if __name__ == "__main__":
    run_as_program(main)
