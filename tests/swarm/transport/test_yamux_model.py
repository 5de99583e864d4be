"""Frames in any order, cut anywhere, compared with a simple model of each stream."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from yamux_kit import LIMITS, acted, data, until_blocked, window

from swarm.transport.yamux import YamuxStream
from swarm.transport.yamux.frames import FIN, INITIAL_WINDOW_BYTES, RST, SYN


@dataclass
class Modelled:
    """The expected state of one stream."""

    sent: bytes = b""
    ended: bool = False
    reset: bool = False
    credit: int = INITIAL_WINDOW_BYTES


@dataclass
class Model:
    streams: dict[int, Modelled] = field(default_factory=dict)
    broken: bool = False

    def breaks(self, verb: str, stream_id: int, number: int) -> bool:
        """Whether this action breaks a rule now."""
        known = self.streams.get(stream_id)
        if known is None:
            return False
        if verb == "open":  # an id may be used again once its stream is forgotten, so not before it was read
            return not known.reset or (known.ended and bool(known.sent))
        return verb == "data" and not known.reset and (known.ended or number > known.credit)

    def apply(self, verb: str, stream_id: int, number: int) -> bytes:
        """Apply an action to the model and return its frame."""
        self.broken = self.breaks(verb, stream_id, number)
        known = self.streams.get(stream_id)
        live = known is not None and not known.reset and not self.broken
        if verb == "open":
            if not self.broken:
                self.streams[stream_id] = Modelled()
            return window(stream_id, flags=SYN)
        if verb == "data":
            payload = bytes([number % 251]) * number
            if live and known is not None:
                known.sent += payload
                known.credit -= number
            return data(stream_id, payload)
        if live and known is not None:
            if verb == "fin":
                known.ended = True
            else:
                known.reset = True
        return data(stream_id, flags=FIN if verb == "fin" else RST)


actions = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "data", "data", "data", "data", "fin", "rst"]),
        st.sampled_from([1, 3]),
        st.sampled_from([1, 2, 100, 5_000, 150_000]),
        st.integers(0, 15).map(lambda roll: roll == 0),  # whether it is done although it breaks a rule
    ),
    min_size=10,
    max_size=30,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(actions, st.lists(st.integers(1, 200_000), min_size=1, max_size=8))
def test_any_interleaving_does_what_the_model_says(script: list[tuple[str, int, int, bool]], cuts: list[int]) -> None:
    trio.run(_play, script, cuts)


async def _play(script: list[tuple[str, int, int, bool]], cuts: list[int]) -> None:
    model = Model()
    wire = b""
    expected: list[Modelled] = []
    for *action, wicked in script:
        if model.breaks(*action) and not wicked:
            continue
        before = dict(model.streams)
        wire += model.apply(*action)
        expected += [each for name, each in model.streams.items() if before.get(name) is not each]
        if model.broken:
            break
    async with acted(replace(LIMITS, window_budget_bytes=0, accept_backlog=1000)) as peer:
        with suppress(trio.BrokenResourceError):
            for piece in _pieces(wire, cuts):
                await peer.send(piece)
        assert bool(peer.ours.reason) == model.broken, peer.ours.reason
        found = await peer.streams()
        assert len(found) == len(expected)
        counted = peer.ours._streams.values()
        assert model.broken or all(stream in counted for stream in found if stream._unread)  # counts in its window
        for stream, meant in zip(found, expected, strict=True):
            got, ending = await _drain(stream)
            if meant.reset:
                assert (got, ending) == (b"", "broken") or (meant.ended and (got, ending) == (meant.sent, "ended"))
            else:
                assert got == meant.sent
                assert ending == ("ended" if meant.ended else "broken" if model.broken else "open")


def _pieces(wire: bytes, cuts: list[int]) -> Iterator[bytes]:
    place = 0
    for turn in range(40):
        size = cuts[turn % len(cuts)]
        yield wire[place : place + size]
        place += size
    yield wire[place:]


async def _drain(stream: YamuxStream) -> tuple[bytes, str]:
    got, ending = b"", "open"

    async def read() -> None:
        nonlocal got, ending
        try:
            while piece := await stream.receive_some():
                got += piece
            ending = "ended"
        except trio.BrokenResourceError:
            ending = "broken"

    await until_blocked(read)
    return got, ending
