"""Who gets how much, and for how long: arithmetic over nodes' rates. Pure."""

import math
from collections.abc import Sequence
from itertools import accumulate

from node.ledger.assignment.rate import Rate
from node.ledger.settings import Settings
from node.ledger.state import Node

__all__ = ["duration_s", "finishable", "poured", "sample_s", "share", "together"]


def share(
    node: Node,
    asking: Sequence[Node],
    work: int,
    waits_s: Sequence[float] = (),
    tokens: float | None = None,
    *,
    endless: bool = False,
) -> int:
    """How many more of `work` samples (open in all) `node` should get: b_i = B * rate_i / sum of rates (SparrowRL),
    less what it has. An idle node always gets one, or it could never be measured. `asking` includes `node`.

    `waits_s`: how long until each of them may begin, because its engine's version is too old. With `tokens`, what a
    sample has lately, they then get so much that all are done at one time. `endless`: more comes for whatever is done,
    so nobody waits for the end; what the fast have no room for now the others get.
    """
    rates = comparable([other.rate for other in asking])
    i = asking.index(node)
    if tokens is None or not any(waits_s):
        amounts = [work * rate / sum(rates) for rate in rates]
    else:
        amounts = together([rate / tokens for rate in rates], waits_s, work)
    if endless:
        amounts = poured(amounts, [other.capacity for other in asking])
    return max(math.ceil(amounts[i]) - node.outstanding, 0 if node.outstanding else 1)


def poured(amounts: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """`amounts` as far as each has room for its own, and what is too much for some among the others in proportion."""
    if all(amount <= room for amount, room in zip(amounts, rooms, strict=True)):
        return list(amounts)
    first_full = sorted((room / amount, amount, room) for amount, room in zip(amounts, rooms, strict=True) if amount)
    weights = list(accumulate(amount for _, amount, _ in reversed(first_full)))[::-1]  # from each on: of those after it
    left, times = sum(amounts), math.inf
    for (full_at, _, room), weight in zip(first_full, weights, strict=True):
        if full_at > left / weight:  # neither is this one full then, nor any after it: each gets so many times its own
            times = left / weight
            break
        left -= room
    return [min(amount * times, room) if amount else 0.0 for amount, room in zip(amounts, rooms, strict=True)]


def together(speeds: Sequence[float], waits_s: Sequence[float], work: float) -> list[float]:
    """How much of `work` each gets of those who do `speeds` of it a second from `waits_s` on, that all end together at
    the earliest time D: speed * max(0, D - wait), where D solves sum = work."""
    speed = done = 0.0
    end_s = math.inf
    for wait_s, own in sorted(zip(waits_s, speeds, strict=True)):
        if end_s <= wait_s:
            break
        speed += own
        done += own * wait_s
        end_s = (work + done) / speed
    return [own * max(0.0, end_s - wait_s) for own, wait_s in zip(speeds, waits_s, strict=True)]


def sample_s(node: Node, tokens: float) -> float:
    """How long `node` should need for one sample of about `tokens` tokens; 0 while nothing is known."""
    return tokens * (node.token_s.mean or 0.0)


def finishable(node: Node, seconds: float, tokens: float) -> int:
    """How many more samples of about `tokens` tokens `node` should finish within `seconds`, besides what it has.

    Of a node that was never measured nothing can be said: one, if it has none.
    """
    if math.isinf(seconds):
        return 1 << 30
    if seconds < sample_s(node, tokens):
        return 0
    if not node.rate.value:
        return 0 if node.outstanding else 1
    return math.floor(seconds * node.rate.value / max(tokens, 1.0)) - node.outstanding


def duration_s(node: Node, max_tokens: int, settings: Settings) -> float:
    """How long a lease runs: what the node holds, at full length, at a rate that it will hardly fall below (its own
    average less twice its own spread), and then some."""
    if node.rate.low <= 0:
        return settings.max_deadline_s
    ahead = settings.deadline_slack * node.outstanding * max_tokens / node.rate.low
    return min(max(ahead, settings.min_deadline_s), settings.max_deadline_s)


def comparable(rates: Sequence[Rate]) -> list[float]:
    """Rates to share by. Who is not measured yet counts as claimed, but no faster than the fastest that was measured;
    who claims nothing counts as an average one. So a boast is worth little, and not for long."""
    measured = [rate.mean for rate in rates if rate.observed_s]
    fastest = max(measured, default=math.inf)
    known = [rate.mean if rate.observed_s else min(rate.claimed, fastest) for rate in rates]
    positive = [value for value in known if value > 0]
    usual = sum(positive) / len(positive) if positive else 1.0
    floor = max(usual / 1000.0, 1e-6)  # a stalled node keeps a crumb, or its rate could never rise again
    guessed = [value if rate.observed_s else value or usual for value, rate in zip(known, rates, strict=True)]
    return [max(value, floor) for value in guessed]
