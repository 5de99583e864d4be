"""How many samples each node gets, and for how long: arithmetic over nodes' rates. Pure."""

import math
from collections.abc import Sequence
from itertools import accumulate

from node.ledger.assignment.rate import Rate
from node.ledger.settings import Settings
from node.ledger.state import Node

__all__ = ["duration_s", "fill_rooms", "finish_together", "finishable", "sample_s", "share"]


def share(
    node: Node,
    asking: Sequence[Node],
    work: int,
    waits_s: Sequence[float] = (),
    tokens: float | None = None,
    *,
    endless: bool = False,
) -> int:
    """How many more of `work` samples `node` should get: b_i = B * rate_i / sum of rates (SparrowRL), less what it has.

    `work` counts all open samples, and `asking` includes `node`. An idle node always gets one, because its rate could
    not be measured otherwise. `waits_s` says how long each node must wait before it may begin, because its engine's
    version is too old; given `tokens`, the recent length of a sample, all nodes then get as much as lets them finish at
    one time. `endless` means that more work follows whatever is done, so no node waits for the end: the others get what
    the fast nodes have no room for now.
    """
    rates = comparable([other.rate for other in asking])
    i = asking.index(node)
    if tokens is None or not any(waits_s):
        amounts = [work * rate / sum(rates) for rate in rates]
    else:
        amounts = finish_together([rate / tokens for rate in rates], waits_s, work)
    if endless:
        amounts = fill_rooms(amounts, [other.capacity for other in asking])
    return max(math.ceil(amounts[i]) - node.outstanding, 0 if node.outstanding else 1)


def fill_rooms(amounts: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Cap each amount at its room, and divide the excess among the others in proportion to their amounts, up to their
    rooms."""
    if all(amount <= room for amount, room in zip(amounts, rooms, strict=True)):
        return list(amounts)
    first_full = sorted((room / amount, amount, room) for amount, room in zip(amounts, rooms, strict=True) if amount)
    weights = list(accumulate(amount for _, amount, _ in reversed(first_full)))[::-1]  # the sum from each entry on
    left, times = sum(amounts), math.inf
    for (full_at, _, room), weight in zip(first_full, weights, strict=True):
        if full_at > left / weight:  # this entry, and each after it, has room for so many times its own amount
            times = left / weight
            break
        left -= room
    return [min(amount * times, room) if amount else 0.0 for amount, room in zip(amounts, rooms, strict=True)]


def finish_together(speeds: Sequence[float], waits_s: Sequence[float], work: float) -> list[float]:
    """Divide `work` among workers with `speeds` (work per second) that may begin after `waits_s`, such that all finish
    at the same, earliest time D: speed * max(0, D - wait), where D solves sum = work."""
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
    """Seconds that `node` should need for one sample of about `tokens` tokens; 0 while that is unknown."""
    return tokens * (node.token_s.mean or 0.0)


def finishable(node: Node, seconds: float, tokens: float) -> int:
    """How many samples of about `tokens` tokens `node` should finish within `seconds`, besides the ones that it has.

    For a node that was never measured: one, if it has none.
    """
    if math.isinf(seconds):
        return 1 << 30
    if seconds < sample_s(node, tokens):
        return 0
    if not node.rate.value:
        return 0 if node.outstanding else 1
    return math.floor(seconds * node.rate.value / max(tokens, 1.0)) - node.outstanding


def duration_s(node: Node, max_tokens: int, settings: Settings) -> float:
    """How long a lease runs: `deadline_slack` times what the node needs for all that it holds, at full length and at
    `Rate.low`, within the bounds of `settings`."""
    if node.rate.low <= 0:
        return settings.max_deadline_s
    ahead = settings.deadline_slack * node.outstanding * max_tokens / node.rate.low
    return min(max(ahead, settings.min_deadline_s), settings.max_deadline_s)


def comparable(rates: Sequence[Rate]) -> list[float]:
    """Positive rates to divide work by.

    A node that was not measured yet counts as it claims, but as no faster than the fastest measured node; a node that
    claims nothing counts as average. So an exaggerated claim gains little, and not for long.
    """
    measured = [rate.mean for rate in rates if rate.observed_s]
    fastest = max(measured, default=math.inf)
    known = [rate.mean if rate.observed_s else min(rate.claimed, fastest) for rate in rates]
    positive = [value for value in known if value > 0]
    usual = sum(positive) / len(positive) if positive else 1.0
    floor = max(usual / 1000.0, 1e-6)  # a stalled node keeps a little, or its rate could never rise again
    guessed = [value if rate.observed_s else value or usual for value, rate in zip(known, rates, strict=True)]
    return [max(value, floor) for value in guessed]
