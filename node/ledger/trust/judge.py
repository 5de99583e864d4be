"""Is this rollout what was asked for, from a version that counts? Pure checks of one result against one lease."""

import itertools
from collections.abc import Mapping
from typing import Final

import numpy as np
from blake3 import blake3

from node.engines.base import MIN_LOGPROB, Version
from node.ledger.messages import Reason, Rollout, VersionSpan, work_hash
from node.ledger.settings import Settings
from node.ledger.state import Group, Head

__all__ = ["fingerprint", "judge", "lag_reason", "oldest_version", "too_fast"]

LOGPROB_SLACK: Final = 1e-3
"""A log-probability may exceed 0 by rounding, no more."""


def judge(rollout: Rollout, group: Group, head: Head, roots: Mapping[Version, bytes]) -> Reason | None:
    """None when `rollout` may count for its sample of `group`; otherwise why not."""
    if rollout.work != work_hash(group.id, rollout.sample, group.prompt, group.sampling):
        return Reason.WRONG_WORK
    if not _well_formed(rollout, group):
        return Reason.MALFORMED
    for span in rollout.spans:
        if reason := _span_reason(span, head, roots, group.max_lag):
            return reason
    return None


def too_fast(rollout: Rollout, seconds: float, settings: Settings) -> bool:
    """No engine draws so many tokens, one after another, in the time since they were asked for."""
    tokens = len(rollout.token_ids) // 4
    return tokens >= settings.fast_needs and tokens > seconds * settings.fastest_sequence


def fingerprint(rollout: Rollout, group: Group, settings: Settings) -> bytes | None:
    """What another sample has only by copying: prompt and tokens, where these were improbable. None: they were not, or
    a seed was asked for, with which they are the same every time.

    Goes by what the node says of their probability; who claims that everything was certain is found out by a check.
    """
    surprise = -float(np.frombuffer(rollout.logprobs, "<f4").sum(dtype=np.float64))
    if group.sampling.temperature == 0.0 or group.sampling.extra.seeded or surprise < settings.copy_surprise:
        return None
    return blake3(len(group.prompt).to_bytes(4, "little") + group.prompt + rollout.token_ids).digest(16)


def lag_reason(version: Version, head: Head, max_lag: int) -> Reason | None:
    """Is `version` within the staleness bound of `head`? A version of a rolled-back epoch never is."""
    if version > head.name:
        return Reason.TOO_NEW
    epoch, newest = head.counted_from(max_lag)
    if version[0] != epoch or newest - version[1] > max_lag:
        return Reason.TOO_OLD
    return None


def oldest_version(rollout: Rollout) -> Version:
    """The oldest version that any token of `rollout` came from."""
    return min((span.epoch, span.version) for span in rollout.spans)


def _span_reason(span: VersionSpan, head: Head, roots: Mapping[Version, bytes], max_lag: int) -> Reason | None:
    version = (span.epoch, span.version)
    if reason := lag_reason(version, head, max_lag):
        return reason
    root = roots.get(version)
    if root is None:
        return Reason.TOO_OLD  # within the bound, yet from before this ledger's memory: cannot be checked
    return None if root == span.root else Reason.WRONG_ROOT


def _well_formed(rollout: Rollout, group: Group) -> bool:
    """Lengths agree, values make sense, it ends where the sampling says that it must, and spans cover every token."""
    if len(rollout.token_ids) % 4 or len(rollout.logprobs) != len(rollout.token_ids):
        return False
    tokens, logprobs = np.frombuffer(rollout.token_ids, "<u4"), np.frombuffer(rollout.logprobs, "<f4")
    most = group.sampling.max_tokens
    if not 0 < len(tokens) <= most:
        return False
    ends_here = np.isin(tokens, np.array(group.sampling.stop_tokens, np.uint32))
    options = group.sampling.extra
    if options.allowed and not np.isin(tokens, np.array(options.allowed, np.uint32)).all():
        return False
    by_text = rollout.finish_reason == "stop" and bool(options.stop_texts)  # which text it was its client can see
    if rollout.finish_reason == "stop" and len(tokens) <= options.min_tokens:
        return False
    ends = [span.end for span in rollout.spans]
    versions = [(span.epoch, span.version) for span in rollout.spans]
    return (
        bool(((logprobs >= MIN_LOGPROB) & (logprobs <= LOGPROB_SLACK)).all())  # which no NaN is
        and not ends_here[:-1].any()
        and (by_text or bool(ends_here[-1]) if rollout.finish_reason == "stop" else len(tokens) == most)
        and ends[-1] == len(tokens)
        and all(a < b for a, b in itertools.pairwise([0, *ends]))
        and all(a < b for a, b in itertools.pairwise(versions))  # an engine only moves forward
    )
