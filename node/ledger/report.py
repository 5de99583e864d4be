"""The ledger as people and programs see it: built for the status, and never changed from there."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from node.ledger.messages import Reason
from node.ledger.rules import Ledger
from node.ledger.state import Node
from node.ledger.trust.checks import Checks
from node.ledger.trust.rewards import RewardChecks
from node.ledger.trust.verifier import Verifier, class_of
from node.status.schema import (
    CheckCounts,
    CommitTimes,
    EvidenceStatus,
    LedgerNode,
    LedgerStatus,
    QuarantineStatus,
    RewardCounts,
    TimeSplit,
)
from node.verification.record import NodeRecord

__all__ = ["report"]


def report(
    ledger: Ledger, now: float, unread: int = 0, unmet: Mapping[str, Sequence[str]] | None = None
) -> LedgerStatus:
    """The status of `ledger` at `now`. `unread`, `unmet`: the fields of that name, which the service knows."""
    groups = ledger.groups.values()
    nodes = list(ledger.nodes.values())
    members = [ledger.nodes[key] for key in sorted(ledger.members)]
    generating = _generating(members)
    due_s = ledger.assigner.version_timing.due_s(now)
    verifier = ledger.quarantine.verifier
    return LedgerStatus(
        groups_open=sum(not group.complete and not group.terms.evaluates for group in groups),
        groups_ready=sum(group.complete and not group.terms.evaluates for group in groups),
        groups_evaluating=sum(group.terms.evaluates for group in groups),
        samples_free=sum(len(group.free) for group in groups),
        samples_leased=sum(len(group.leased) for group in groups),
        samples_to_come=sum(ledger.pool.to_come.values()),
        tokens_per_s=sum((node.rate.value for node in members), 0.0),
        generating=generating,
        useful=None if generating is None else round(generating * _used_share(nodes), 4),
        samples_used=sum(node.used for node in nodes),
        samples_unused=sum(node.unused.total() for node in nodes),
        unused=_by_reason(node.unused for node in nodes),
        next_version_s=None if math.isinf(due_s) else round(due_s, 3),
        accepted=sum(node.accepted for node in nodes),
        refused=_by_reason(node.refused for node in nodes),
        checks=_checks(ledger.quarantine.checks, verifier),
        rewards=_rewards(ledger.quarantine.rewards),
        unread=unread,
        unmet={session: list(options) for session, options in (unmet or {}).items()},
        nodes={node.key.hex(): _node(ledger, node, now) for node in nodes},
    )


def _checks(checks: Checks, verifier: Verifier) -> CheckCounts:
    judgements = verifier.judgements
    return CheckCounts(
        begun=checks.begun,
        confirmed=checks.confirmed,
        open=len(checks.open),
        given_up=checks.given_up,
        judged=judgements.answered,
        judging=len(judgements.open),
        not_judged=judgements.given_up,
        drifts=verifier.drifts,
        period=verifier.period,
        commitment=verifier.commitment.hex(),
        next_commitment=verifier.next_commitment.hex(),
        opened=verifier.opened.hex(),
    )


def _rewards(rewards: RewardChecks) -> RewardCounts:
    counts, functions = rewards.counts, rewards.functions
    return RewardCounts(
        checked=counts.checked,
        unchecked=counts.unchecked,
        wrong=counts.wrong,
        disputed=counts.disputed,
        open=len(rewards.open),
        functions={name: dict(found) for name, found in sorted(functions.declared.items())},
        chosen=dict(functions.chosen),
    )


def _evidence(record: NodeRecord, node: Node) -> EvidenceStatus:
    return EvidenceStatus(
        factor=_factor(record.log),
        kinds={str(kind): _factor(log) for kind, log in sorted(record.logs.items())},
        checks=record.checks,
        tokens=record.tokens,
        opinions=record.opinions,
        arithmetic=class_of(node).name.rstrip("/") if node.abilities is not None else "",
    )


def _factor(log: float) -> float:
    """Three digits, and no infinity, which JSON does not have."""
    return float(f"{math.exp(min(log, 700.0)):.3g}")


def _node(ledger: Ledger, node: Node, now: float) -> LedgerNode:
    reputation, sheet, penalty = node.reputation, node.timesheet, node.reputation.penalty
    arrival_s = ledger.assigner.version_timing.arrival_s(node.key, ledger.head.name, now)
    status = LedgerNode(
        member=node.key in ledger.members,
        tokens_per_s=round(node.rate.value, 3),
        spread=round(node.rate.spread, 3),
        outstanding=node.outstanding,
        capacity=node.capacity,
        accepted=node.accepted,
        tokens=node.tokens,
        refused=_by_reason([node.refused]),
        quarantines=reputation.times,
        checked=reputation.checked,
        disputed=reputation.disputed,
        arrival_s=None if arrival_s is None else round(arrival_s, 3),
        used=node.used,
        unused=_by_reason([node.unused]),
    )
    if (record := ledger.quarantine.verifier.records.get(node.key)) is not None:
        status.evidence = _evidence(record, node)
    if penalty is not None:
        left_s = None if penalty.until is None else max(0.0, penalty.until - now)
        status.quarantine = QuarantineStatus(why=penalty.why, left_s=left_s)
    if sheet is not None:
        status.seconds = TimeSplit(
            generate=sheet.generate_s,
            wait_work=sheet.wait_work_s,
            wait_version=sheet.wait_version_s,
            commit=sheet.commit_s,
        )
        status.generating = round(sheet.useful, 4)
        status.useful = round(sheet.useful * _used_share([node]), 4)
        status.commits = [
            CommitTimes(
                version=(commit.epoch, commit.version),
                wait_s=commit.wait_s,
                stage_s=commit.stage_s,
                pause_s=commit.pause_s,
                resume_s=commit.resume_s,
            )
            for commit in sheet.commits
        ]
    return status


def _by_reason(counts: Iterable[Mapping[Reason, int]]) -> dict[str, int]:
    total = Counter[str]()
    for count in counts:
        total.update({str(reason): number for reason, number in count.items()})
    return dict(total)


def _used_share(nodes: Collection[Node]) -> float:
    """The used tokens by all tokens of samples that are known to be used or never to be; 1 while there are none."""
    used, unused = sum(node.used_tokens for node in nodes), sum(node.unused_tokens for node in nodes)
    return used / (used + unused) if used + unused else 1.0


def _generating(nodes: Collection[Node]) -> float | None:
    """The seconds in which nodes generated by all their seconds; None while no node has reported."""
    sheets = [node.timesheet for node in nodes if node.timesheet is not None]
    total_s = sum(s.generate_s + s.wait_work_s + s.wait_version_s + s.commit_s for s in sheets)
    return round(sum(s.generate_s for s in sheets) / total_s, 4) if total_s else None
