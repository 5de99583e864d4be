"""LEB128 integers and text: each value has one encoding, and the reader refuses all others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import PeerError
from codec.varint import MAX_INT, Reader, Writer


@given(st.integers(0, MAX_INT))
def test_numbers_round_trip(value: int) -> None:
    out = Writer()
    out.uint(value)
    reader = Reader(bytes(out.data), "x")
    assert reader.uint("n") == value
    reader.end()


@given(st.binary(max_size=12))
def test_only_the_shortest_form_is_read(data: bytes) -> None:
    reader = Reader(data, "x")
    try:
        value = reader.uint("n")
    except PeerError:
        return
    out = Writer()
    out.uint(value)
    assert data.startswith(bytes(out.data))
    assert reader.left == len(data) - len(out.data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ends too soon"),
        (b"\x80", "ends too soon"),
        (b"\x80\x00", "shortest"),
        (b"\xff" * 9, "too long"),
        (b"\x05", "more than 4"),
    ],
)
def test_malformed_numbers_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(PeerError, match=f"what.field: .*{why}"):
        Reader(data, "what").uint("field", 4)


def test_text_is_bounded_and_utf8() -> None:
    out = Writer()
    out.text("grüße")
    assert Reader(bytes(out.data), "x").text("t", 7) == "grüße"
    with pytest.raises(PeerError, match="more than 6"):
        Reader(bytes(out.data), "x").text("t", 6)
    with pytest.raises(PeerError, match="not UTF-8"):
        Reader(b"\x01\xff", "x").text("t", 6)
    with pytest.raises(PeerError, match="ends too soon"):
        Reader(b"\x05abc", "x").text("t", 6)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(PeerError, match=r"x\.end: 1 bytes too many"):
        Reader(b"\x00", "x").end()
