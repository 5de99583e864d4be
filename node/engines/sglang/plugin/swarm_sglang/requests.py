"""Ends and prefixes of requests, by hooks of SGLang's plugin interface.

- A request of the driver's (its id begins with `swarm-`) ends with one of its own stop tokens, and with no others.
- Prefixes are cached under a key that contains the version, for all requests, so a prefix of an older policy is never
  used.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

from typing import Any

from .asked import OURS

__all__ = ["hook", "name_prefixes", "prefix_key"]

_key = ""
"""What is added to the keys of prefixes; empty: no swarm has named the weights yet."""
_names = 0
"""How often the weights were named. A version that is loaded anew is named again: its older prefixes are not used."""
_scheduler: Any = None
"""This process's scheduler; None in others."""


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    owner = "sglang.srt.managers.scheduler.Scheduler"
    ends = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"
    HookRegistry.register(f"{owner}.__init__", _remember, HookType.AFTER)
    HookRegistry.register(f"{owner}.handle_generate_request", _key_request, HookType.BEFORE)
    HookRegistry.register(ends, _ends, HookType.AROUND)


def name_prefixes(version: str) -> None:
    """The weights of this process are `version` now. No step may run meanwhile."""
    global _key, _names
    before, _names = _key, _names + 1
    _key = f"swarm:{version}#{_names}"
    for request in () if _scheduler is None else _scheduler.waiting_queue:
        own = (request.extra_key or "").removesuffix(before).removesuffix("|") if before else request.extra_key
        request.extra_key = _keyed(own)


def prefix_key() -> str:
    """What is added to the keys of prefixes now: another one under other weights."""
    return _key


def _keyed(own: str | None) -> str | None:
    return f"{own}|{_key}" if own and _key else _key or own


def _remember(_: Any, made: Any, *__: Any, **___: Any) -> None:
    global _scheduler
    _scheduler = made


def _key_request(_: Any, request: Any, **__: Any) -> None:
    request.extra_key = _keyed(request.extra_key)


def _ends(original: Any, request: Any, new: list[int]) -> bool:
    if not request.rid.startswith(OURS):
        return original(request, new)
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    stops = request.sampling_params.stop_token_ids or ()
    for i, token in enumerate(new):
        if token in stops:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new) + i + 1
            return True
    return False
