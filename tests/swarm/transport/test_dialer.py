"""Which addresses are dialed when, and how long a peer is left alone after failures."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.dialer import Dialer, DialRules

PEER = bytes(32)
Attempt = Callable[[PeerKey, str], Awaitable[Any]]


def network(answers: dict[str, float | None]) -> tuple[list[tuple[float, str]], Attempt]:
    """The log of attempts, and an `attempt`. `answers`: seconds until an address answers, or None if it refuses."""
    log: list[tuple[float, str]] = []

    async def attempt(peer: PeerKey, address: str) -> str:
        log.append((trio.current_time(), address))
        after_s = answers.get(address)
        await trio.sleep(after_s or 0)
        if after_s is None:
            raise ConnectionRefusedError("refused")
        return address

    return log, attempt


async def test_the_first_address_that_answers_wins(autojump_clock: trio.testing.MockClock) -> None:
    log, attempt = network({"slow": 8.0, "mute": 1e9, "good": 0.1})
    assert await Dialer(DialRules(), attempt).dial(PEER, ["refusing", "mute", "slow", "good"]) == "good"  # type: ignore[comparison-overlap]
    assert log == [(0, "refusing"), (0, "mute"), (0.5, "slow"), (1.0, "good")]  # after a refusal there is no pause
    assert trio.current_time() == pytest.approx(1.1)


async def test_each_address_has_a_deadline(autojump_clock: trio.testing.MockClock) -> None:
    _, attempt = network({"mute": 1e9})
    with pytest.raises(Unreachable, match="mute"):
        await Dialer(DialRules(), attempt).dial(PEER, ["mute"])
    assert trio.current_time() == pytest.approx(12)


async def test_backoff_grows_and_is_forgiven(autojump_clock: trio.testing.MockClock) -> None:
    log, attempt = network({})
    dialer = Dialer(DialRules(), attempt)
    waits = []
    for _ in range(12):
        with pytest.raises(Unreachable, match="refused"):
            await dialer.dial(PEER, ["x"])
        failed_s = trio.current_time()
        while True:
            try:
                await dialer.dial(PEER, [])  # too early: raises, and tries no address
            except Unreachable as error:
                if "next try in" not in str(error):
                    break
            await trio.sleep(0.05)
        waits.append(trio.current_time() - failed_s)
    assert len(log) == 12
    assert 0.25 <= waits[0] <= 0.6
    assert max(waits) <= 30.1
    dialer.forgive(PEER)
    with pytest.raises(Unreachable, match="refused"):
        await dialer.dial(PEER, ["x"])


async def test_after_a_dial_that_nobody_answered_the_next_may_follow_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    log, attempt = network({"mute": 1e9})
    dialer = Dialer(DialRules(backoff_most_s=12.0), attempt)
    for _ in range(10):
        with pytest.raises(Unreachable, match="mute"):
            await dialer.dial(PEER, ["mute"])
    assert [at for at, _ in log] == [pytest.approx(12 * n) for n in range(10)]


async def test_a_list_of_addresses_from_a_stranger_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    log, attempt = network({})
    with pytest.raises(Unreachable):
        await Dialer(DialRules(), attempt).dial(PEER, [f"a{number}" for number in range(1000)])
    assert len(log) == 16
