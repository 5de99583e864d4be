"""Every message and frame head makes a round trip; any other bytes raise `PeerError` and nothing else."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec import ChunkKey
from codec.errors import PeerError
from swarm.protocol.core import wire
from swarm.protocol.core.wire import (  # fmt: skip
    FRAME_HEAD,
    MAX_FRAME_BODY,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Attach,
    Bye,
    Credit,
    Frame,
    FrameKind,
    Have,
    Hello,
    Join,
    Message,
    Refused,
    Reports,
    WantChunk,
    Work,
    decode,
    encode,
    pack_frame,
    unpack_frame_head,
)

KINDS = sorted(Message.__subclasses__(), key=lambda kind: kind.__struct_config__.tag)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold, within its bounds; long values are kept short."""
    info = msgspec.inspect.type_info(kind)
    return _of(info)


def _of(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.BytesType():
            least = info.min_length or 0
            return st.binary(min_size=least, max_size=min(info.max_length or 64, max(least, 64)))
        case msgspec.inspect.StrType():
            least = info.min_length or 0
            return st.text(st.characters(codec="utf-8"), min_size=least, max_size=min(info.max_length or 64, 64))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            most = info.le if info.le is not None else info.lt - 1
            return st.integers(info.ge, most)
        case msgspec.inspect.FloatType():
            return st.floats(info.ge, info.le)
        case msgspec.inspect.VarTupleType():
            return st.lists(_of(info.item_type), max_size=min(info.max_length, 4)).map(tuple)
        case msgspec.inspect.StructType():
            return st.builds(info.cls, *[_of(field.type) for field in info.fields])
    raise AssertionError(f"no strategy for {info}")


MESSAGES = st.sampled_from(KINDS).flatmap(values)


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert tags == list(range(1, len(KINDS) + 1))
    assert {kind.__name__ for kind in KINDS} <= set(wire.__all__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[Message]) -> None:
    @given(values(kind))
    def check(message: Message) -> None:
        assert decode(encode(message)) == message

    check()


@given(MESSAGES, st.data())
def test_truncated(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(PeerError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(MESSAGES, st.binary(min_size=1, max_size=8))
def test_extended(message: Message, more: bytes) -> None:
    with pytest.raises(PeerError):
        decode(encode(message) + more)


@given(MESSAGES, st.data())
def test_altered_bytes_never_do_worse_than_peer_error(message: Message, data: st.DataObject) -> None:
    whole = bytearray(encode(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(whole))
    except PeerError:
        return
    assert decode(encode(decoded)) == decoded


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(data: bytes, versioned: bool) -> None:
    try:
        decode(bytes((PROTOCOL,)) + data if versioned else data)
    except PeerError:
        return
    assert versioned or data[0] == PROTOCOL


def packed(fields: list[Any]) -> bytes:
    return bytes((PROTOCOL,)) + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(bytes((PROTOCOL,)), id="no body"),
        pytest.param(bytes((PROTOCOL + 1,)) + encode(Work(b""))[1:], id="another protocol version"),
        pytest.param(packed([99, b""]), id="unknown tag"),
        pytest.param(packed([0, b""]), id="tag zero"),
        pytest.param(packed(["18", b""]), id="tag of the wrong type"),
        pytest.param(packed([]), id="no tag"),
        pytest.param(packed([18]), id="field missing"),
        pytest.param(packed([18, b"", b""]), id="field too many"),
        pytest.param(packed([18, "text"]), id="text for bytes"),
        pytest.param(packed([10, 64]), id="stripe out of range"),
        pytest.param(packed([10, -1]), id="stripe below zero"),
        pytest.param(packed([10, 1.0]), id="a float for an integer"),
        pytest.param(packed([11, 0, 1 << 63]), id="credit beyond 63 bits"),
        pytest.param(packed([14, 1, 4, bytes(32), 0]), id="unknown kind of blob"),
        pytest.param(packed([14, 1, 1, bytes(31), 0]), id="short name"),
        pytest.param(packed([3, "x" * 33, ""]), id="long code"),
        pytest.param(packed([4, bytes(4097), 0, 0, 0, 0]), id="long grant"),
        pytest.param(packed([12, 0, 0, 0, 0, bytes(129)]), id="long piece set"),
        pytest.param(bytes((PROTOCOL,)) + b"\x91" * 5000, id="nested deep"),
        pytest.param(bytes((PROTOCOL,)) + b"\xdd\xff\xff\xff\xff", id="array of four billion"),
        pytest.param(bytes((PROTOCOL,)) + b"\x92\x12\xc6\xff\xff\xff\xff", id="bytes of four billion"),
        pytest.param(bytes((PROTOCOL,)) + b"\x93\x03\xa1\xff\xa0", id="text that is not UTF-8"),
        pytest.param(bytes((PROTOCOL,)) + bytes(MAX_MESSAGE_BYTES), id="oversized"),
    ],
)
def test_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode(data)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, -0.1, 1.1e7])
def test_rates_that_are_not_finite_or_too_large_are_refused(rate: float) -> None:
    with pytest.raises(PeerError):
        decode(packed([1, b"", [], "", "", rate, 0.0, False]))


@pytest.mark.parametrize(
    ("message", "bound"),
    [
        (Join(b"", ("/a",) * 17, "", "", 0.0, 0.0, False), 16),
        (Reports(0, (b"",) * 4097), 4096),
        (Attach(0, 0, 0, 0, (Have(0, 0, 0, 0, b""),) * 65537), 65536),
    ],
    ids=["addresses", "reports", "haves"],
)
def test_more_items_than_a_list_may_have(message: Message, bound: int) -> None:
    with pytest.raises(PeerError, match=str(bound)):
        decode(encode(message))


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ValueError, match="more than a message may have"):
        encode(Attach(0, 0, 0, 0, (Have(1 << 31, 1 << 62, 1 << 31, 1 << 31, bytes(128)),) * 40000))


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Credit(0, 1).total = 2  # type: ignore[misc]
    assert Refused("a", "b") != Bye(b"")
    assert hash(Hello(b"", 0, 0, 0, 0)) == hash(Hello(b"", 0, 0, 0, 0))
    assert WantChunk(0, 0, 0, 0, b"") == WantChunk(0, 0, 0, 0, b"")


# ---------------------------------------------------------------- frames

FRAMES = st.builds(
    lambda kind, stripe, key, number, length, before, after: Frame(
        kind, stripe, ChunkKey(*key), number, before, before + length + after, length
    ),
    st.sampled_from([FrameKind.HEADER, FrameKind.PIECE, FrameKind.PART]),
    st.integers(0, 255),
    st.tuples(
        st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)
    ),
    st.integers(0, 2**32 - 1),
    st.integers(0, MAX_FRAME_BODY),
    st.integers(0, 1 << 38),
    st.integers(0, 1 << 38),
)


@given(FRAMES)
def test_frame_round_trip(frame: Frame) -> None:
    head = pack_frame(frame)
    assert len(head) == FRAME_HEAD
    assert unpack_frame_head(head) == frame


@given(st.binary(max_size=2 * FRAME_HEAD))
def test_frame_heads_of_any_length_and_content(head: bytes) -> None:
    try:
        frame = unpack_frame_head(head)
    except PeerError:
        return
    assert len(head) == FRAME_HEAD
    assert frame.length <= MAX_FRAME_BODY
    assert pack_frame(frame) == head


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(Frame(0, 0, ChunkKey(0, 1, 0, 0), 0, 0, 0, 0), id="kind zero"),
        pytest.param(Frame(4, 0, ChunkKey(0, 1, 0, 0), 0, 0, 0, 0), id="unknown kind"),
        pytest.param(Frame(FrameKind.PIECE, 0, ChunkKey(0, 1, 0, 0), 0, 0, 0, MAX_FRAME_BODY + 1), id="oversized"),
        pytest.param(Frame(FrameKind.PART, 0, ChunkKey(0, 1, 0, 0), 0, 9, 10, 2), id="part past its whole"),
        pytest.param(Frame(FrameKind.PART, 0, ChunkKey(0, 1, 0, 0), 0, 0, (1 << 40) + 1, 2), id="absurd whole"),
    ],
)
def test_frame_refused(frame: Frame) -> None:
    with pytest.raises(PeerError):
        unpack_frame_head(pack_frame(frame))


def test_a_frame_of_a_version_that_no_message_could_name_is_refused() -> None:
    with pytest.raises(PeerError, match="version"):
        unpack_frame_head(pack_frame(Frame(FrameKind.PART, 255, ChunkKey(0, 1 << 63, 0, 0), 1, 0, 10, 10)))
