"""What every engine draws by `SamplingOptions`, compared with the transformers engine."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from node.engines.base import Prompt, SamplingOptions, SamplingParams
from node.engines.texts import Continuation

PROMPT = tuple(range(3, 40))
TOKENS = 24
WITHIN = 0.1
"""Largest difference in nats per token between two engines' arithmetic: the ledger's tolerance."""
OPTIONS = {
    "top_k": SamplingOptions(top_k=3),
    "min_p": SamplingOptions(min_p=0.2),
    "presence": SamplingOptions(presence_penalty=2.0),
    "frequency": SamplingOptions(frequency_penalty=2.0),
    "repetition": SamplingOptions(repetition_penalty=3.0),
    "bias": SamplingOptions(logit_bias=((70, 3.0), (71, 3.0), (72, -5.0))),
    "allowed": SamplingOptions(allowed=tuple(range(60, 80))),
    "banned": SamplingOptions(allowed=(70, 71, 72), banned=((70,), (71, 71))),
    "least": SamplingOptions(min_tokens=8, logit_bias=((70, 20.0),)),
    "all": SamplingOptions(
        min_tokens=4, top_k=20, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3,
        logit_bias=((70, 2.0),), banned=((71, 72),),
    ),
}  # fmt: skip


HOWS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 0.8, "top_p": 0.9},
]


def option_cells() -> list[Any]:
    """Each (name of options, how to draw). CI draws with each of them in one way."""
    return [
        pytest.param(name, how, id=f"{name}-how{j}", marks=() if i % len(HOWS) == j else pytest.mark.long)
        for i, name in enumerate(OPTIONS)
        for j, how in enumerate(HOWS)
    ]


def transformers_engine(folder: Path) -> Any:
    """The same weights in a transformers engine."""
    from node.engines.transformers import TransformersEngine

    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(folder)
    return engine


def draw(one: Any, options: SamplingOptions, **more: Any) -> tuple[Any, SamplingParams]:
    sampling = SamplingParams(**{"max_tokens": TOKENS, "stop_tokens": (70,)} | more, options=options)
    (completion,) = one.generate([Prompt(PROMPT, 1)], sampling)
    return completion, sampling


def largest_difference(claimed: Any, found: Any) -> float:
    return float(np.abs(np.array(claimed) - np.array(found)).mean())


def check_allowed(one: Any) -> None:
    """Every token is allowed by the options."""
    hot = {"temperature": 2.0, "seed": 9}
    assert set(draw(one, OPTIONS["allowed"], **hot)[0].token_ids) <= set(range(60, 80))
    banned = draw(one, OPTIONS["banned"], **hot)[0].token_ids
    assert 70 not in banned
    assert (71, 71) not in set(itertools.pairwise(banned))
    for least in (0, 8):
        completion, _ = draw(one, SamplingOptions(min_tokens=least, logit_bias=((70, 60.0),)))
        assert (completion.token_ids.index(70), completion.finish_reason) == (least, "stop")


def check_stop_text(one: Any, other: Any) -> None:
    """No token is drawn after a stop text: it ends at the same one as the transformers engine, `other`."""
    letters = SamplingOptions(allowed=tuple(range(36, 62)))
    plain, _ = draw(one, letters, temperature=2.0, seed=1)
    text = Continuation(Tokenizer.from_file(str(other._texts.path)), PROMPT)
    parts = [text.add(token) for token in plain.token_ids]
    stop = "".join(parts[6:9])
    wanted = next(i for i in range(1, TOKENS) if stop in "".join(parts[:i]))
    options = SamplingOptions(allowed=letters.allowed, stop_texts=(stop, "nowhere"))
    completion, _ = draw(one, options, temperature=2.0, seed=1)
    assert (completion.token_ids, completion.finish_reason) == (plain.token_ids[:wanted], "stop")
    assert completion.spans[-1].end == wanted < TOKENS
    later = SamplingOptions(allowed=letters.allowed, stop_texts=(stop,), min_tokens=wanted)
    assert len(draw(one, later, temperature=2.0, seed=1)[0].token_ids) > wanted
    forced = SamplingOptions(logit_bias=((40, 100.0),), stop_texts=("".join(parts_of(other, (40, 40, 40))),))
    mine = other.generate([Prompt(PROMPT)], SamplingParams(TOKENS, 0.0, options=forced))[0]
    assert (mine.token_ids, mine.finish_reason) == ((40, 40, 40), "stop")
    assert draw(one, forced, temperature=0.0)[0].token_ids == mine.token_ids


def parts_of(engine: Any, tokens: tuple[int, ...]) -> list[str]:
    text = Continuation(Tokenizer.from_file(str(engine._texts.path)), PROMPT)
    return [text.add(token) for token in tokens]
