"""A bug in the core ends the session of the peer that caused it; a timer that met one is due again."""

from pathlib import Path

import pytest
import trio
from bench_kit import OTHER, PEER, bench

from codec import ChunkKey
from swarm import guard
from swarm.protocol.core.events import Effect, Event, Heard, PieceBad, SendDone, Timer
from swarm.protocol.core.wire import Detach
from swarm.runtime.framing import frame_message


@pytest.fixture(autouse=True)
def _survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_STRICT")
    guard.bugs.clear()


async def test_a_bug_in_the_core_ends_the_session_of_the_peer_that_caused_it(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as b:
        apply = b.core.apply

        def failing(event: Event, now: float) -> list[Effect]:
            if isinstance(event, Heard) and event.message == Detach(7):
                raise OverflowError("ours")
            return apply(event, now)

        monkeypatch.setattr(b.core, "apply", failing)
        stream = await b.control()
        await stream.send_all(frame_message(Detach(7)))
        await b.settle()
        assert guard.bugs[guard.Source.CORE] == 1
        assert [event.peer for event in b.core.of(PieceBad)] == [PEER.public]
        assert b.runtime.peers.get(PEER.public) is None
        await trio.sleep(61)  # it is refused for a while
        again = await b.control()
        await again.send_all(frame_message(Detach(1)))
        await b.settle()
        assert Detach(1) in [event.message for event in b.core.of(Heard)], "the runtime continues"


async def test_a_timer_that_met_a_bug_is_due_again(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as b:
        went_off: list[float] = []

        def failing(event: Event, now: float) -> list[Effect]:
            if event == Timer("tick"):
                went_off.append(now)
                raise KeyError("ours")
            return []

        monkeypatch.setattr(b.core, "apply", failing)
        b.runtime._loop.set_timer("tick", trio.current_time() + 0.1)
        await b.runtime.apply(Timer("anything"))  # the loop looks at its timers after each event
        went_off.clear()
        await trio.sleep(3.5)
        assert len(went_off) == 4


async def test_other_effects_are_begun_when_one_fails(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        begun: list[str] = []
        b.runtime._begin[Timer] = lambda effect: begun.append(effect.name)  # type: ignore[index, misc]

        def fail(effect: object) -> None:
            raise ValueError("ours")

        b.runtime._begin[SendDone] = fail  # type: ignore[index]
        with pytest.raises(ValueError, match="ours"):
            b.runtime.perform([Timer("a"), SendDone(b"", None, None, 0), Timer("b")])  # type: ignore[list-item]
        assert begun == ["a", "b"]


async def test_messages_of_strangers_are_short(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        b.core.strangers.add(PEER.public)
        stream = await b.control()
        await stream.send_all((8193).to_bytes(4, "little"))
        await b.settle()
        assert [event.what for event in b.core.of(PieceBad)] == ["message: 8193 bytes, at most 8192"]


async def test_timers_that_are_always_due_keep_no_event_from_its_turn(tmp_path: Path, autojump_clock: object) -> None:
    """Regression: when all tasks together took longer than a tick, a timer was always due; no renewal was applied."""
    async with bench(tmp_path) as b:
        stream, apply, heard = await b.control(), b.core.apply, trio.Event()

        def again(event: Event, now: float) -> list[Effect]:
            if event == Timer("tick") and not heard.is_set():
                b.runtime._loop.set_timer("tick", now)
            if isinstance(event, Heard) and event.message == Detach(3):
                heard.set()
            return apply(event, now)

        b.core.apply = again  # type: ignore[method-assign]
        b.runtime._loop.set_timer("tick", trio.current_time())
        await b.runtime.apply(Timer("anything"))
        await stream.send_all(frame_message(Detach(3)))
        for _ in range(1000):
            await trio.lowlevel.checkpoint()
        happened = heard.is_set()
        heard.set()  # otherwise the mock clock would never advance
        assert happened


async def test_bulk_streams_of_strangers_wake_no_task(tmp_path: Path, autojump_clock: object) -> None:
    """Regression: each stream polled fifty times a second for admission, and strangers may have a thousand of them."""
    async with bench(tmp_path) as b:
        b.core.strangers.add(PEER.public)
        await b.control()
        asked = 0
        admits = b.runtime.peers._admits

        def counted(peer: bytes) -> bool:
            nonlocal asked
            asked += 1
            return admits(peer)

        b.runtime.peers._admits = counted
        for _ in range(5):
            await b.bulk()
        await trio.sleep(10)
        assert asked <= 10


async def test_an_event_that_nothing_precedes_is_applied_at_once(tmp_path: Path, autojump_clock: object) -> None:
    """Without a turn of the core's task; behind a queued event it waits for its turn."""
    async with bench(tmp_path) as b:
        await b.control()
        await b.settle()
        loop, first, second, third = b.runtime._loop, *(Heard(PEER.public, Detach(number)) for number in (1, 2, 3))
        await loop.post(first)
        assert b.core.of(Heard)[-1:] == [first]
        loop._queue.put_nowait(second, PEER.public)
        await loop.post(third)
        assert b.core.of(Heard)[-1:] == [first]
        await b.settle()
        assert b.core.of(Heard)[-3:] == [first, second, third]


async def test_events_that_are_applied_at_once_leave_others_their_turn(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        await b.settle()
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await trio.lowlevel.checkpoint()
            b.runtime._loop._direct_s = 1.0  # as after many events
            before = others
            for number in range(200):  # more than may be queued
                await b.runtime._loop.post(Heard(PEER.public, Detach(number)))
            assert others > before
            nursery.cancel_scope.cancel()
        await b.settle()
        assert [event.message.stripe for event in b.core.of(Heard)[-200:]] == list(range(200))
        assert b.runtime._loop._direct_s < 1.0


async def test_an_event_that_an_effect_caused_follows_at_once(tmp_path: Path, autojump_clock: object) -> None:
    """It goes before what is queued, after all effects of its cause, and may itself be followed. At other times, and at
    the end of a long turn, nothing follows: the caller posts it."""
    async with bench(tmp_path) as b:
        await b.control()
        await b.settle()
        loop, apply = b.runtime._loop, b.core.apply
        results: list[bool] = []
        done = [SendDone(PEER.public, None, ChunkKey(0, 1, 0, 0), index) for index in range(3)]
        follows = {Heard(PEER.public, Detach(1)): done[0], done[0]: done[1]}

        def caused(event: Event, now: float) -> list[Effect]:
            effects = apply(event, now)
            return [*effects, Timer("follow")] if event in follows else effects  # type: ignore[list-item]

        b.core.apply = caused  # type: ignore[method-assign]
        b.runtime._begin[Timer] = lambda effect: results.append(loop.follow(follows[b.core.events[-1]]))  # type: ignore[index]
        assert not loop.follow(done[2])
        loop._queue.put_nowait(Heard(PEER.public, Detach(1)), PEER.public)
        loop._queue.put_nowait(Heard(PEER.public, Detach(2)), PEER.public)
        await b.settle()
        assert b.core.events[-4:] == [Heard(PEER.public, Detach(1)), done[0], done[1], Heard(PEER.public, Detach(2))]
        await loop.post(Heard(PEER.public, Detach(1)))
        assert b.core.events[-3:] == [Heard(PEER.public, Detach(1)), done[0], done[1]], "in the poster's own turn"
        assert results == [True] * 4
        loop._turn_began_s = 0.0  # long ago
        assert not loop.follow(done[2])


async def test_a_bug_in_what_follows_ends_the_session_of_its_own_peer(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        await b.settle()
        loop, apply = b.runtime._loop, b.core.apply
        cause = Heard(OTHER.public, Detach(1))

        def failing(event: Event, now: float) -> list[Effect]:
            if event == cause:
                loop.follow(SendDone(PEER.public, None, ChunkKey(0, 1, 0, 0), 0))
            if isinstance(event, SendDone):
                raise OverflowError("ours")
            return apply(event, now)

        monkeypatch.setattr(b.core, "apply", failing)
        await loop.post(cause)
        assert [event.peer for event in b.core.of(PieceBad)] == [PEER.public]
        await b.settle()
        assert b.runtime.peers.get(PEER.public) is None
        assert loop._turn_began_s is None
