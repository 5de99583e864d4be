"""The ledger as people and programs see it: plain values, read and never changed.

`groups_open`, `groups_ready`, `samples_free`, `samples_leased`, `samples_to_come` (of prompts whose number is known),
`tokens_per_s` (all members), `generating` (the share of the nodes' time in which they generated), `useful` (that share
times the share of the tokens drawn that trainers and clients have used), `accepted`, `refused` (by reason),
`samples_used` (taken by a trainer or a client), `samples_unused` (drawn, and never to be used) and `unused` (those by
reason), `next_version_s` (until the next seal is expected, or None), `checks`, `unread` (bodies dropped because their
node had said too much), `unmet` (by open session, the sampling options that it asks for and no node can do), and
`nodes` by public key in hex:

- `member`, `tokens_per_s`, `spread`, `outstanding`, `capacity`, `accepted`, `tokens`, `refused`
- `quarantine`: None, or `why` and `left_s` (None: until it is released); `quarantines`: how often; `checked`,
  `disputed`: of its samples
- `used`, `unused`: its samples, as above
- `arrival_s`: until its engine is expected to hold the head
- `seconds`: where its time went (`generate`, `wait_work`, `wait_version`, `commit`), `generating` and `useful`, as
  above; None: not said yet
- `commits`: of its last versions, `version`, `wait_s`, `stage_s`, `pause_s`, `resume_s`
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from node.ledger.rules import Ledger
from node.ledger.state import Node

__all__ = ["report"]


def report(
    ledger: Ledger, now: float, unread: int = 0, unmet: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """How `ledger` stands."""
    groups = ledger.groups.values()
    nodes = list(ledger.nodes.values())
    due_s = ledger.assigner.version_timing.due_s(now)
    return {
        "groups_open": sum(not group.complete for group in groups),
        "groups_ready": sum(group.complete for group in groups),
        "samples_free": sum(len(group.free) for group in groups),
        "samples_leased": sum(len(group.leased) for group in groups),
        "samples_to_come": sum(ledger.pool.to_come.values()),
        "tokens_per_s": sum(ledger.nodes[key].rate.value for key in ledger.members),
        "generating": (generating := _generating([ledger.nodes[key] for key in sorted(ledger.members)])),
        "useful": None if generating is None else round(generating * _used_share(nodes), 4),
        "samples_used": sum(node.used for node in nodes),
        "samples_unused": sum(node.unused.total() for node in nodes),
        "unused": {str(reason): n for reason, n in sum((node.unused for node in nodes), Counter()).items()},
        "next_version_s": None if math.isinf(due_s) else round(due_s, 3),
        "accepted": sum(node.accepted for node in nodes),
        "refused": dict(sum((Counter({str(r): n for r, n in node.refused.items()}) for node in nodes), Counter())),
        "checks": {
            "begun": ledger.quarantine.checks.begun,
            "confirmed": ledger.quarantine.checks.confirmed,
            "open": len(ledger.quarantine.checks.open),
            "given_up": ledger.quarantine.checks.given_up,
        },
        "unread": unread,
        "unmet": dict(unmet or {}),
        "nodes": {node.key.hex(): _node(ledger, node, now) for node in nodes},
    }


def _node(ledger: Ledger, node: Node, now: float) -> dict[str, Any]:
    reputation, sheet = node.reputation, node.timesheet
    penalty = reputation.penalty
    arrival_s = ledger.assigner.version_timing.arrival_s(node.key, ledger.head.name, now)
    return {
        "member": node.key in ledger.members,
        "tokens_per_s": round(node.rate.value, 3),
        "spread": round(node.rate.spread, 3),
        "outstanding": node.outstanding,
        "capacity": node.capacity,
        "accepted": node.accepted,
        "tokens": node.tokens,
        "refused": {str(reason): count for reason, count in node.refused.items()},
        "quarantine": None
        if penalty is None
        else {"why": penalty.why, "left_s": None if penalty.until is None else max(0.0, penalty.until - now)},
        "quarantines": reputation.times,
        "checked": reputation.checked,
        "disputed": reputation.disputed,
        "arrival_s": None if arrival_s is None else round(arrival_s, 3),
        "seconds": None
        if sheet is None
        else {
            "generate": sheet.generate_s,
            "wait_work": sheet.wait_work_s,
            "wait_version": sheet.wait_version_s,
            "commit": sheet.commit_s,
        },
        "used": node.used,
        "unused": {str(reason): count for reason, count in node.unused.items()},
        "generating": None if sheet is None else round(sheet.useful, 4),
        "useful": None if sheet is None else round(sheet.useful * _used_share([node]), 4),
        "commits": []
        if sheet is None
        else [
            {
                "version": [commit.epoch, commit.version],
                "wait_s": commit.wait_s,
                "stage_s": commit.stage_s,
                "pause_s": commit.pause_s,
                "resume_s": commit.resume_s,
            }
            for commit in sheet.commits
        ],
    }


def _used_share(nodes: Collection[Node]) -> float:
    """Of the tokens of samples whose fate is known; 1 while none is."""
    used, unused = (sum(getattr(node, name) for node in nodes) for name in ("used_tokens", "unused_tokens"))
    return used / (used + unused) if used + unused else 1.0


def _generating(nodes: list[Node]) -> float | None:
    """Generating seconds of all by all their seconds; None while nobody has said."""
    sheets = [node.timesheet for node in nodes if node.timesheet is not None]
    total = sum(s.generate_s + s.wait_work_s + s.wait_version_s + s.commit_s for s in sheets)
    return round(sum(s.generate_s for s in sheets) / total, 4) if total else None
