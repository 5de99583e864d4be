"""Decides whether a rollout counts, by its lease, its group, the sealed versions and earlier rollouts. Pure."""

import itertools
import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
from blake3 import blake3

from codec.routes import RouteShape
from node.engines.base import MIN_LOGPROB, SamplingParams, Version
from node.engines.prompt_scores import is_scores
from node.engines.top_logprobs import is_top
from node.ledger.assignment.draws import drawn_with, samplings_of
from node.ledger.assignment.leases import REASON_CODES, REASONS, LeaseTable
from node.ledger.messages import Reason, Rollout, VersionSpan
from node.ledger.part_history import PartHistory
from node.ledger.recent import Recent
from node.ledger.routes import has_routes_as_asked
from node.ledger.settings import Settings
from node.ledger.state import AcceptedRollout, Group, Head, LiveLease
from node.ledger.trust.rewards import has_reward_as_asked

__all__ = ["Acceptance", "fingerprint", "judge", "too_fast"]

LOGPROB_SLACK: Final = 1e-3
"""Rounding may make a log-probability exceed 0 by this much."""

_KEY: Final = struct.Struct("<QI")
"""(lease, sample)"""
_DIGEST_BYTES: Final = 16


class Acceptance:
    """Judges rollouts; remembers its verdicts, and the tokens that were accepted. `table` and `parts` belong to the
    ledger."""

    def __init__(self, settings: Settings, table: LeaseTable, parts: PartHistory) -> None:
        self._settings = settings
        self._table = table
        self._parts = parts
        self._verdicts = Recent(settings.remembered, _KEY.size, 1 + _DIGEST_BYTES)
        """By lease and sample: the verdict on the signed rollout, and its digest."""
        self._fingerprints = Recent(settings.remembered, _DIGEST_BYTES, _DIGEST_BYTES)
        """Fingerprint of accepted tokens -> the random stream (`_owner`) that they were accepted for."""

    def __len__(self) -> int:
        """The number of verdicts remembered."""
        return len(self._verdicts)

    def earlier_verdict(self, rollout: Rollout, sealed: bytes) -> tuple[Reason | None] | None:
        """The verdict on these very bytes, in a tuple; None: they are new."""
        known = self._verdicts.get(_KEY.pack(rollout.lease, rollout.sample))
        return (REASONS[known[0]],) if known is not None and known[1:] == _digest(sealed) else None

    def verdict_of(self, lease: int, sample: int) -> tuple[Reason | None] | None:
        """The verdict that is remembered of a sample of a lease, in a tuple; None: there is none."""
        known = self._verdicts.get(_KEY.pack(lease, sample))
        return None if known is None else (REASONS[known[0]],)

    def remember_verdict(self, rollout: Rollout, sealed: bytes, reason: Reason | None) -> None:
        """Remember the verdict on a rollout of a live lease, for its repetitions."""
        self._remember(rollout.lease, rollout.sample, sealed, reason)

    def adopt(self, group: Group) -> None:
        """Take in a group that the book kept: its nodes may repeat rollouts whose verdicts they did not receive."""
        for sample, done in group.done.items():
            self._remember(done.lease, sample, done.sealed, None)

    def _remember(self, lease: int, sample: int, sealed: bytes, reason: Reason | None) -> None:
        self._verdicts.set(_KEY.pack(lease, sample), REASON_CODES[reason] + _digest(sealed))

    def lease_reason(self, node: bytes, rollout: Rollout, *, member: bool) -> Reason | None:
        """None when `rollout` belongs to an open sample of a live lease of `node`."""
        lease = self._table.leases.get(rollout.lease)
        if lease is None:
            return self._table.ended(rollout.lease)
        if lease.node != node:
            return Reason.WRONG_NODE
        if lease.token != rollout.token:
            return Reason.FENCED
        if not member:
            return Reason.NOT_A_MEMBER
        if rollout.sample not in lease.samples:
            return Reason.WRONG_WORK
        return None if rollout.sample in lease.open else Reason.DUPLICATE

    def judge(
        self,
        lease: LiveLease,
        group: Group,
        rollout: Rollout,
        head: Head,
        roots: Mapping[Version, bytes],
        now: float,
        shape: RouteShape | None = None,
    ) -> Reason | None:
        """None when `rollout` may count for its sample; otherwise why not. `shape`: of the model's routes."""
        if reason := judge(rollout, group, head, roots, samplings_of(group, lease), self._parts):
            return reason
        if not (has_routes_as_asked(rollout, group, shape) and has_reward_as_asked(rollout, group)):
            return Reason.MALFORMED
        if not is_top(rollout.top, rollout.length, group.sampling.extra.top_logprobs):
            return Reason.MALFORMED
        if not is_scores(rollout.prompt_scores, len(group.prompt) // 4, group.sampling.extra.prompt_logprobs):
            return Reason.MALFORMED
        if too_fast(rollout, now - lease.granted, self._settings):
            return Reason.TOO_FAST
        own = _owner(rollout, group)
        found = fingerprint(rollout, group, self._settings)
        known = None if found is None else self._fingerprints.get(found)
        return Reason.COPIED if known not in (None, own) else None

    def accepted(self, group: Group, done: AcceptedRollout) -> None:
        """Remember the tokens of `done`: another sample with the same tokens is a copy."""
        if (found := fingerprint(done.rollout, group, self._settings)) is not None:
            self._fingerprints.set(found, _owner(done.rollout, group))


def judge(
    rollout: Rollout,
    group: Group,
    head: Head,
    roots: Mapping[Version, bytes],
    samplings: tuple[SamplingParams, ...],
    parts: PartHistory,
) -> Reason | None:
    """None when `rollout` is what was asked for, by one of `samplings`, from versions that count; otherwise why not."""
    if drawn_with(group.id, group.prompt, rollout, samplings) is None:
        return Reason.WRONG_WORK
    if not _well_formed(rollout, group):
        return Reason.MALFORMED
    for span in rollout.spans:
        if reason := _span_reason(span, head, roots, group, parts):
            return reason
    return None


def too_fast(rollout: Rollout, seconds: float, settings: Settings) -> bool:
    """Whether no engine could generate its tokens, one after another, in the `seconds` since they were leased."""
    tokens = rollout.length
    return tokens >= settings.fast_needs and tokens > seconds * settings.fastest_sequence


def fingerprint(rollout: Rollout, group: Group, settings: Settings) -> bytes | None:
    """A hash of prompt and tokens that a sample of another random stream can share only by copying.

    None when the tokens were probable. It trusts the node's own log-probabilities; a node that claims that every token
    was certain is found by a check.
    """
    surprise = -float(np.frombuffer(rollout.logprobs, "<f4").sum(dtype=np.float64))
    if group.sampling.temperature == 0.0 or surprise < settings.copy_surprise:
        return None
    return _digest(len(group.prompt).to_bytes(4, "little") + group.prompt + rollout.token_ids)


def _owner(rollout: Rollout, group: Group) -> bytes:
    """Names the random stream of a sample: with a seed, all samples of this number have the same one."""
    extra = group.sampling.extra
    stream = b"seed" + group.sampling.seed.to_bytes(8, "little") if extra.seeded else b"group" + group.id
    return _digest(rollout.sample.to_bytes(4, "little") + stream)


def _span_reason(
    span: VersionSpan, head: Head, roots: Mapping[Version, bytes], group: Group, parts: PartHistory
) -> Reason | None:
    version = (span.epoch, span.version)
    if reason := group.lag_reason(version, head, parts):
        return reason
    root = roots.get(version)
    if root is None:
        return Reason.TOO_OLD  # within the bound, but the ledger does not remember its root, so it cannot be checked
    return None if root == span.root else Reason.WRONG_ROOT


def _well_formed(rollout: Rollout, group: Group) -> bool:
    """Lengths agree, values are possible, it ends where the sampling requires, and the spans cover every token."""
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
    by_text = rollout.finish_reason == "stop" and bool(options.stop_texts)  # its client can see which text it was
    if rollout.finish_reason == "stop" and len(tokens) <= options.min_tokens:
        return False
    ends = [span.end for span in rollout.spans]
    versions = [(span.epoch, span.version) for span in rollout.spans]
    return (
        bool(((logprobs >= MIN_LOGPROB) & (logprobs <= LOGPROB_SLACK)).all())  # false for NaN, too
        and not ends_here[:-1].any()
        and (by_text or bool(ends_here[-1]) if rollout.finish_reason == "stop" else len(tokens) == most)
        and ends[-1] == len(tokens)
        and all(a < b for a, b in itertools.pairwise([0, *ends]))
        and all(a < b for a, b in itertools.pairwise(versions))  # an engine only moves forward
    )


def _digest(data: bytes) -> bytes:
    return blake3(data).digest(_DIGEST_BYTES)
