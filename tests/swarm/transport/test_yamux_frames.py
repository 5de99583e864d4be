"""The frame parser: it turns any bytes into frames or a `PeerError`."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import PeerError
from swarm.transport.yamux.frames import ACK, FIN, HEADER_BYTES, RST, SYN, FrameParser, Head, Kind, encode_head

MAX_FRAME = 1 << 16

flags = st.integers(0, SYN | ACK | FIN | RST)
ids = st.integers(1, 2**32 - 1)
numbers = st.integers(0, 2**32 - 1)
frames = st.one_of(
    st.tuples(flags, ids, st.binary(max_size=300)).map(
        lambda each: (Head(Kind.DATA, each[0], each[1], len(each[2])), each[2])
    ),
    st.tuples(flags, ids, numbers).map(lambda each: (Head(Kind.WINDOW, *each), b"")),
    st.tuples(flags, numbers).map(lambda each: (Head(Kind.PING, each[0], 0, each[1]), b"")),
    st.tuples(flags, numbers).map(lambda each: (Head(Kind.GO_AWAY, each[0], 0, each[1]), b"")),
)


def parse(pieces: list[bytes]) -> list[tuple[Head, bytes]]:
    parser = FrameParser(MAX_FRAME)
    found: list[tuple[Head, bytes]] = []
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, Head):
                found.append((event, b""))
            else:
                head, payload = found[-1]
                found[-1] = (head, payload + event)
    return found


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.lists(frames, max_size=12), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_split_gives_the_same_frames(sent: list[tuple[Head, bytes]], places: list[int]) -> None:
    data = b"".join(encode_head(*head) + payload for head, payload in sent)
    assert parse(cut(data, places)) == sent
    assert parse([data]) == sent
    assert parse([data[place : place + 1] for place in range(len(data))]) == sent


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (b"\1" + encode_head(Kind.PING, SYN, 0, 1)[1:], "version"),
        (bytes([0, 4]) + encode_head(Kind.PING, SYN, 0, 1)[2:], "kind"),
        (bytes([0, 255]) + encode_head(Kind.PING, SYN, 0, 1)[2:], "kind"),
        (encode_head(Kind.PING, 16, 0, 1), "flags"),
        (encode_head(Kind.DATA, 0, 0, 1), "stream id 0"),
        (encode_head(Kind.WINDOW, 0, 0, 1), "stream id 0"),
        (encode_head(Kind.PING, SYN, 5, 1), "stream id 5"),
        (encode_head(Kind.GO_AWAY, 0, 5, 1), "stream id 5"),
        (encode_head(Kind.DATA, 0, 1, MAX_FRAME + 1), "length"),
        (encode_head(Kind.DATA, SYN, 1, 2**32 - 1), "length"),
    ],
)
def test_what_breaks_a_rule_is_named(header: bytes, field: str) -> None:
    with pytest.raises(PeerError, match=field):
        parse([header])
    with pytest.raises(PeerError, match=field):
        parse([header[place : place + 1] for place in range(HEADER_BYTES)])


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=64), max_size=20))
def test_fuzz(pieces: list[bytes]) -> None:
    """Random bytes give frames or a `PeerError`; the parser never holds back more than an incomplete header."""
    parser = FrameParser(MAX_FRAME)
    taken = 0
    try:
        for piece in pieces:
            taken += sum(HEADER_BYTES if isinstance(event, Head) else len(event) for event in parser.feed(piece))
    except PeerError:
        return
    assert 0 <= sum(map(len, pieces)) - taken < HEADER_BYTES


def test_fuzz_from_valid_frames() -> None:
    """A valid conversation with single bytes changed, since random bytes hardly ever get past the first header."""
    source = random.Random(4)
    good = b"".join(
        encode_head(Kind.DATA, SYN if n == 0 else 0, 1 + 2 * (n % 3), n * 7) + bytes(n * 7) for n in range(20)
    )
    outcomes = set()
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        try:
            parse(cut(bytes(data), [source.randrange(len(data)) for _ in range(5)]))
            outcomes.add("frames")
        except PeerError as error:
            outcomes.add(str(error).split()[1])
    assert outcomes == {"frames", "version", "kind", "flags", "stream", "length"}
