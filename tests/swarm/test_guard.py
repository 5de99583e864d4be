"""Guards stop the errors that a peer can cause; `UsageError` and cancellation propagate."""

import gc
import logging
import weakref

import pytest
import trio
import trio.testing

from codec.errors import PeerError, UsageError
from swarm import guard
from swarm.guard import Seldom, Source, guarded
from swarm.protocol.core.bucket import Bucket


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_seldom", Seldom())
    monkeypatch.delenv("SWARM_STRICT")
    guard.bugs.clear()
    guard.dropped.clear()


def test_a_broken_rule_is_stopped_and_counted() -> None:
    with guarded(Source.CONTROL, b"\1" * 32) as outcome:
        raise PeerError("message: no")
    assert (outcome.why, outcome.is_rule_broken) == ("message: no", True)
    assert (guard.dropped[Source.CONTROL], guard.bugs[Source.CONTROL]) == (1, 0)


@pytest.mark.parametrize(
    "error", [trio.TooSlowError(), trio.BrokenResourceError("gone"), OSError(107, "not connected")]
)
def test_network_errors_are_not_broken_rules(error: Exception) -> None:
    with guarded(Source.PROBE) as outcome:
        raise error
    assert outcome.error is error
    assert outcome.why
    assert not outcome.is_rule_broken


@pytest.mark.parametrize("error", [ValueError("?"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "?"), RecursionError()])
def test_a_bug_is_stopped_and_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with guarded(Source.WORK, "box-7") as outcome:
        raise error
    assert outcome.is_rule_broken
    assert guard.bugs[Source.WORK] == 1
    assert caplog.records[-1].levelno == logging.ERROR
    assert caplog.records[-1].exc_info


def test_strict_raises_bugs_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_STRICT", "1")
    with guarded(Source.WORK):
        raise PeerError("no")
    with pytest.raises(KeyError), guarded(Source.WORK):
        raise KeyError("ours")


def test_usage_errors_propagate() -> None:
    with pytest.raises(UsageError), guarded(Source.BULK):
        raise ExceptionGroup("both", [PeerError("no"), UsageError("The disk is full.")])


async def test_cancellation_passes_through() -> None:
    with trio.CancelScope() as scope:
        with guarded(Source.STREAM) as outcome:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_fail_when_cancelled)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        await trio.lowlevel.checkpoint()
        pytest.fail("the scope was cancelled")
    assert scope.cancelled_caught
    assert outcome.why == "too late"


async def _fail_when_cancelled() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise PeerError("too late")


def test_of_several_errors_a_bug_counts_before_a_broken_connection() -> None:
    with guarded(Source.STREAM) as outcome:
        raise ExceptionGroup("", [trio.BrokenResourceError(), ExceptionGroup("", [KeyError("ours")])])
    assert isinstance(outcome.error, KeyError)


def test_repeated_lines_are_left_out_and_counted() -> None:
    now = 0.0
    seldom = Seldom(first=2, every_s=60, clock=lambda: now)
    assert [seldom.due("a") for _ in range(5)] == [0, 0, None, None, None]
    assert seldom.due("b") == 0
    now = 61.0
    assert [seldom.due("a"), seldom.due("a")] == [3, None]


def test_a_bucket_gives_its_rate_and_its_burst() -> None:
    bucket = Bucket(rate=10, burst=5)
    assert sum(bucket.take(1, 100.0) for _ in range(20)) == 5
    assert sum(bucket.take(1, 100.0 + i / 10) for i in range(1, 21)) in (19, 20)
    assert bucket.spend(11, 102.0) == pytest.approx(1.1, abs=0.11)
    assert not bucket.take(1, 102.5)
    assert bucket.spend(0, 99.0) > 0, "a clock that goes back pays nothing"


class Buffer:
    """Something large that a session holds."""


@pytest.mark.parametrize("in_nursery", [False, True])
async def test_an_ended_session_is_freed_without_garbage_collection(in_nursery: bool) -> None:
    held: list[weakref.ref[Buffer]] = []

    async def read() -> None:
        buffer = Buffer()
        held.append(weakref.ref(buffer))
        try:
            raise KeyError(id(buffer))
        except KeyError as error:
            raise PeerError("not a message") from error

    async def session() -> str:
        with guarded(Source.CONTROL, b"\x01" * 32) as outcome:
            if in_nursery:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    await read()
            else:
                await read()
        return outcome.why

    gc.collect()
    gc.disable()
    try:
        assert await session() == "not a message"
        await trio.testing.wait_all_tasks_blocked()
        assert held[0]() is None
    finally:
        gc.enable()
