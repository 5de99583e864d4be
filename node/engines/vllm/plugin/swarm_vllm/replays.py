"""Replays: requests whose tokens are claimed by another node, and are computed as if this engine drew them.

A replay is an ordinary request, beside any others. Its claimed tokens before `start` are put in the place of drawn
ones, as they are in a request that vLLM preempted, so vLLM reads them at once and every option counts them as drawn.
`draws` forces the tokens from there on.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import math
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus
from vllm.v1.worker import gpu_model_runner

from .adapters import id_of

__all__ = ["REPLAY", "abort_begun", "begin", "claimed_of", "install", "margin_of", "rank_of"]

REPLAY = "swarm_replay"
"""In a request's `extra_args`: `start`, and all claimed tokens, a list of a number and a list."""
_MARGIN_STEPS = 1 << 20
"""A nat, in the units in which a rank tells a margin."""
_MOST_MARGIN = 8.0
"""As in `margins`."""

_state_original = gpu_model_runner.CachedRequestState


class _Claimed(NamedTuple):
    start: int
    tokens: tuple[int, ...]


def claimed_of(params: Any) -> _Claimed | None:
    """What a request replays; None for one that does not ask for it, or does so wrongly: a user's own."""
    found = ((getattr(params, "extra_args", None) or {}) if params is not None else {}).get(REPLAY)
    if not isinstance(found, list | tuple) or len(found) != 2:
        return None
    start, tokens = found
    if not isinstance(start, int) or not isinstance(tokens, list | tuple) or not 0 <= start < len(tokens):
        return None
    if not all(isinstance(token, int) and 0 <= token < 1 << 32 for token in tokens):
        return None
    return _Claimed(start, tuple(tokens))


def rank_of(lost: float) -> int:
    """The rank that tells a margin: below 0, as no rank of vLLM's is. A margin above 0 stays above 0."""
    lost = min(_MOST_MARGIN, max(0.0, lost)) if lost == lost else _MOST_MARGIN
    return -1 - math.ceil(lost * _MARGIN_STEPS)


def margin_of(rank: int) -> float:
    """The margin that a rank tells. Raises `ValueError` for one of vLLM's own."""
    if rank >= 0:
        raise ValueError("vLLM's sampler did not replay the tokens")
    return (-1 - rank) / _MARGIN_STEPS


def install() -> None:
    """Change the model runners of this process. A second call does nothing."""
    gpu_model_runner.CachedRequestState = _state


# ---------------------------------------------------------------- in the engine core


def begin(core: Any, request: Any) -> None:
    """Make a request that asks for it a replay, before it is scheduled."""
    if (claimed := claimed_of(request.sampling_params)) is None:
        return
    if _fits(core, request, claimed):
        request.append_output_token_ids(list(claimed.tokens[: claimed.start]))
        request.skip_reading_prefix_cache = True  # vLLM stops if a new request finds more than its prompt there
    else:  # the front finds no margins in its output, and a user's own request is an ordinary one
        request.sampling_params.extra_args.pop(REPLAY)


def _fits(core: Any, request: Any, claimed: _Claimed) -> bool:
    config = core.vllm_config.model_config
    if request.prompt_token_ids is None or request.max_tokens != len(claimed.tokens) or request.num_output_tokens:
        return False
    length = len(request.prompt_token_ids) + len(claimed.tokens)
    return length <= config.max_model_len and max(claimed.tokens) < config.get_vocab_size()


def abort_begun(core: Any, adapter: int = 0) -> None:
    """Abort the replays of which something was computed: the rest would be computed by other weights.

    `adapter`: only those of this adapter; 0: all, because the base changed.
    """
    begun = [
        name
        for name, request in core.scheduler.requests.items()
        if request.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
        and claimed_of(request.sampling_params) is not None
        and adapter in (0, id_of(request))
    ]
    if begun:
        core._send_abort_outputs(core.scheduler.finish_requests(begun, RequestStatus.FINISHED_ABORTED))


# ---------------------------------------------------------------- in the model runner of CPUs


def _state(*args: Any, **named: Any) -> Any:
    """A request's state in the model runner. A replay's has the tokens before `start`, as the engine core's has."""
    state = _state_original(*args, **named)
    if not state.output_token_ids and (claimed := claimed_of(state.sampling_params)) is not None:
        state.output_token_ids.extend(claimed.tokens[: claimed.start])
    return state
