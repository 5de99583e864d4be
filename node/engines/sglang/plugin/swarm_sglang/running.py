"""What is known of the requests that this process's scheduler runs, by hooks of SGLang's plugin interface.

What the driver asks of a request is read and checked when it arrives. One that asks what cannot be done ends alone,
with a sentence; nothing raises in a step, which would end SGLang.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from swarm_vllm.messages import Options

from .asked import ASKED, OPTIONS, Asked
from .requests import prefix_key
from .structures import guided

__all__ = ["as_ids", "asked_of", "begun_otherwise", "hook", "options_of", "requests", "text_of"]

_running: Sequence[Any] = ()
"""The requests of the batch that runs, in the order of the logits' rows."""


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", _remember, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}._add_request_to_queue", _read, HookType.BEFORE)


def requests(rows: int) -> Sequence[Any]:
    """The requests of the batch that runs, one a row of its logits; empty if they are not as many."""
    return _running if len(_running) == rows else ()


def options_of(request: Any) -> Options | None:
    """The options of a request; None: it has none."""
    return getattr(request, "swarm_options", None)


def asked_of(request: Any) -> Asked | None:
    """What else the driver asks of it; None: nothing."""
    return getattr(request, "swarm_asked", None)


def text_of(request: Any) -> tuple[list[int], list[int]]:
    """(the prompt, the tokens that were drawn after it)."""
    text = [*request.origin_input_ids, *request.output_ids]
    asked = asked_of(request)
    prompt = len(request.origin_input_ids) if asked is None else asked.prompt
    return text[:prompt], text[prompt:]


def begun_otherwise(request: Any) -> bool:
    """Whether the beginning of its text was read under other weights than those that are live."""
    return getattr(request, "swarm_begun", None) != prefix_key()


def as_ids(tokens: Sequence[int], device: Any) -> torch.Tensor:
    """int64, (1, tokens)."""
    return torch.tensor([list(tokens)], dtype=torch.int64, device=device)


def _remember(_: Any, batch: Any, *__: Any, **___: Any) -> None:
    global _running
    _running = batch.reqs
    for request in batch.reqs:
        if asked_of(request) is not None and not hasattr(request, "swarm_begun"):
            request.swarm_begun = prefix_key()


def _read(scheduler: Any, request: Any, *_: Any, **__: Any) -> None:
    """Read what is asked of a request that arrives. Does nothing for one that was retracted, or has ended."""
    if hasattr(request, "swarm_options") or getattr(request, "to_finish", None) is not None:
        return
    request.swarm_options = request.swarm_asked = request.swarm_guide = None
    given = getattr(request.sampling_params, "custom_params", None)
    if not isinstance(given, dict) or not (OPTIONS in given or ASKED in given):
        return
    try:
        options = msgspec.json.decode(given[OPTIONS], type=Options) if OPTIONS in given else None
        asked = msgspec.json.decode(given[ASKED], type=Asked) if ASKED in given else None
        _check(request, options, asked, scheduler.model_config.vocab_size)
        guide = guided(request, options, scheduler.model_config) if options is not None and options.structure else None
    except Exception as error:  # also a RecursionError; if it left here, SGLang would end
        request.set_finish_with_abort(str(error) or type(error).__name__)
        return
    request.swarm_options, request.swarm_asked, request.swarm_guide = options, asked, guide


def _check(request: Any, options: Options | None, asked: Asked | None, vocabulary: int) -> None:
    """Raises `ValueError` for tokens outside the vocabulary, or a text that is not as long as is said."""
    named: list[int] = []
    if options is not None:
        named += [token for token, _ in options.logit_bias] + list(options.allowed)
        named += [token for banned in options.banned for token in banned]
        if not all(options.banned):
            raise ValueError("banned: an empty sequence")
    if asked is not None:
        named += [*asked.claimed, *asked.stops]
        if not 0 < asked.prompt <= len(request.origin_input_ids):
            raise ValueError("the prompt is longer than the text")
        if any(not 0 <= number < 1 << 64 for number in asked.noise or ()):
            raise ValueError("noise: two numbers from 0 to 2^64 - 1")
        told = request.return_logprob and request.logprob.top_logprobs_num == 1
        if (asked.scoring is not None or asked.claimed) and not told:
            raise ValueError("a judgement needs top_logprobs_num=1, for its margins")
    if not all(0 <= token < vocabulary for token in named):
        raise ValueError(f"a token id outside 0 to {vocabulary - 1}")
