"""What the ledger decided, as messages to its nodes."""

from collections.abc import Iterable

from node.ledger.messages import Ask, Withdraw, WorkLease
from node.ledger.state import Group, Lease
from node.ledger.trust.checks import Check

__all__ = ["ask_message", "lease_message", "withdrawals"]

A_MESSAGE = 1024
"""Leases in one `Withdraw`."""


def withdrawals(leases: Iterable[Lease]) -> list[tuple[bytes, Withdraw]]:
    """(node, message): these leases are void."""
    by_node: dict[bytes, list[int]] = {}
    for lease in leases:
        by_node.setdefault(lease.node, []).append(lease.id)
    return [
        (node, Withdraw(tuple(ids[i : i + A_MESSAGE])))
        for node, ids in by_node.items()
        for i in range(0, len(ids), A_MESSAGE)
    ]


def lease_message(lease: Lease, group: Group, now: float) -> WorkLease:
    epoch, version = lease.minimum
    return WorkLease(
        lease=lease.id,
        token=lease.token,
        group=lease.group,
        samples=tuple(sorted(lease.open)),
        prompt=group.prompt,
        sampling=group.sampling,
        deadline_s=max(lease.deadline - now, 0.0),
        epoch=epoch,
        version=version,
        max_lag=group.max_lag,
        whole=group.n if group.whole else 0,
        urgent=bool(group.done),
    )


def ask_message(check: Check) -> Ask:
    epoch, version = check.version
    return Ask(
        check=check.id,
        prompt=check.prompt,
        token_ids=check.rollout.token_ids[: 4 * check.end],
        sampling=check.sampling,
        epoch=epoch,
        version=version,
        start=check.start,
        end=check.end,
    )
