"""Whether a vLLM rounds a row alike in any batch, measured when it has been filled, and the name of its arithmetic.

A few tokens of a made-up text are drawn alone, beside other sequences that began before or end earlier, and replayed
whole and from the middle. A vLLM replays for other nodes only if all of these have the same bits.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from node.engines.arithmetic import class_label
from node.engines.base import Completion, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.judgement import Claim, Judgement
from node.engines.vllm.flights import Flights, begin_judge
from node.engines.vllm.links import PluginLink
from node.engines.vllm.plugin.swarm_vllm.messages import Front, Policy, Rank
from node.verification.classes import KEEPS_KEYS

__all__ = ["class_of", "is_invariant"]

_TOKENS: Final = 12
_PROMPT_TOKENS: Final = 160
"""Longer than a block of vLLM's cache on CPUs, and than the 128 keys from which its attention may divide them."""
_OTHERS: Final = (2, 6)
"""Sequences beside the one that is compared: batches of 3 and of 7 rows."""
_WITHIN_S: Final = 600.0
_SAMPLING: Final = SamplingParams(_TOKENS, top_p=0.9, seed=1, options=SamplingOptions(portable=True))


def class_of(
    front: PluginLink, ranks: Sequence[PluginLink], policy: Policy, engine: str = "vllm", *, drafts: bool = False
) -> str:
    """The ability that names the engine's arithmetic class; empty: its plugin is older and does not tell.

    `engine`: its name in the class. `drafts`: it computes several tokens of a sequence in one step, of which it may
    throw some away.
    """
    hello = [rank.hello for rank in ranks if isinstance(rank.hello, Rank)]
    if not isinstance(front.hello, Front) or not hello or not all(rank.fingerprint for rank in hello):
        return ""
    parts = ("-".join(sorted({getattr(rank, name) for rank in hello})) for name in ("device", "dtype", "attention"))
    device, dtype, attention = parts
    room = front.hello.adapters and not device.startswith(
        "cpu"
    )  # there, room for adapters changes no bit of the base's
    more = ("lora-" if room else "") + ("draft-" if drafts else "")
    attention = (KEEPS_KEYS if policy == "continue" else "") + more + attention
    fingerprint = "-".join(sorted({rank.fingerprint for rank in hello}))
    return class_label(engine, front.hello.vllm.partition("+")[0], device, dtype, attention, len(hello), fingerprint)


def is_invariant(front: PluginLink, adapter: int = 0) -> bool:
    """Draw and replay the probe. False also for a plugin that cannot. Raises `EngineError` when vLLM fails.

    `adapter`: the id in vLLM of the one to draw by; 0: none. Other work may go on meanwhile.
    """
    hello = front.hello
    if not isinstance(hello, Front) or not (hello.replays and hello.portable):
        return False
    flights = Flights()
    random = np.random.default_rng(0)
    length = max(1, min(_PROMPT_TOKENS, hello.longest - _TOKENS))

    def text(tokens: int) -> tuple[int, ...]:
        return tuple(int(token) for token in random.integers(0, hello.vocabulary, tokens))

    asked = Prompt(text(length), 0)
    (alone,) = _draw(flights, front, -1, [asked], adapter).result(_WITHIN_S)
    found = []
    for number, others in enumerate(_OTHERS):
        more = [Prompt(text(5 + 7 * i), i + 1) for i in range(others)]
        flight = -10 * (number + 1)  # the numbers of the node's flights are above 0
        before = _draw(flights, front, flight, more[: others // 2], adapter)
        beside = _draw(flights, front, flight - 1, [asked], adapter)
        after = _draw(flights, front, flight - 2, more[others // 2 :], adapter)
        found.append([future.result(_WITHIN_S) for future in (before, after, beside)][-1][0])
    if any((other.token_ids, other.logprobs) != (alone.token_ids, alone.logprobs) for other in found):
        return False
    starts = (0, _TOKENS // 2)
    claims = [Claim(asked.token_ids, alone.token_ids, _SAMPLING, 0, start=start, replay=True) for start in starts]
    futures = [_replay(front, claim, adapter) for claim in claims]
    judged = [future.result(_WITHIN_S) for future in futures]
    scored = all(one.scores == alone.logprobs[start:] for one, start in zip(judged, starts, strict=True))
    return scored and not any(margin for one in judged for margin in one.margins)


def _draw(
    flights: Flights, front: PluginLink, number: int, prompts: Sequence[Prompt], adapter: int
) -> "Future[list[Completion]]":
    future: Future[Any] = Future()
    flights.begin(front, number, prompts, _SAMPLING, lambda _, outcome: _settle(future, outcome), adapter)
    return future


def _replay(front: PluginLink, claim: Claim, adapter: int) -> "Future[Judgement]":
    future: Future[Any] = Future()
    begin_judge(front, claim, lambda outcome: _settle(future, outcome), adapter)
    return future


def _settle(future: "Future[Any]", outcome: Any) -> None:
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
