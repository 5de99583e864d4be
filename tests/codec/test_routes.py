"""The coder of routes: nothing is lost, sizes reach the bound, and bytes that the encoder did not write are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from codec.errors import PeerError
from codec.routes import MAX_TOKENS, RouteShape, decode_routes, encode_routes, most_bytes, read_header
from scenarios.bench.routes import skewed

GOLDEN = Path(__file__).parent / "golden"
QWEN = RouteShape(48, 8, 128)
"""Qwen3-30B-A3B."""


def uniform(rng: np.random.Generator, tokens: int, shape: RouteShape) -> NDArray[np.int64]:
    keys = rng.random((tokens, shape.layers, shape.experts))
    return np.argsort(keys, -1)[..., : shape.chosen]


@st.composite
def routes(draw: st.DrawFn) -> tuple[NDArray[np.int64], int]:
    experts = draw(st.integers(1, 300))
    shape = RouteShape(draw(st.integers(1, 5)), draw(st.integers(1, min(experts, 12))), experts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = draw(st.integers(0, 40))
    if draw(st.booleans()):
        return uniform(rng, tokens, shape), experts
    return skewed(rng, tokens, shape, draw(st.floats(0, 8)), draw(st.floats(0, 8))), experts


@given(routes())
def test_what_is_decoded_is_what_was_encoded_as_ascending_sets(given: tuple[NDArray[np.int64], int]) -> None:
    ids, experts = given
    tokens, layers, chosen = ids.shape
    shape = RouteShape(layers, chosen, experts)
    data = encode_routes(ids, experts)
    assert read_header(data) == (shape, tokens)
    assert len(data) <= most_bytes(shape, tokens)
    np.testing.assert_array_equal(decode_routes(data, shape, tokens), np.sort(ids, -1))


def test_even_routes_cost_the_bound() -> None:
    ids = uniform(np.random.default_rng(0), 400, QWEN)
    assert QWEN.bits / 8 < len(encode_routes(ids, 128)) / 400 <= 242.4
    assert 242.2 < QWEN.bits / 8 < 242.3


def test_learned_counts_make_skewed_routes_shorter() -> None:
    ids = skewed(np.random.default_rng(0), 400, QWEN, 1.0, 1.5)
    assert len(encode_routes(ids, 128)) / 400 <= 200


@given(st.data())
def test_bytes_that_the_encoder_did_not_write_are_refused_or_are_other_routes(data: st.DataObject) -> None:
    """A change gives an error, or the exact code of other sets: no second code for the same."""
    shape = RouteShape(2, 3, 20)
    ids = np.sort(skewed(np.random.default_rng(data.draw(st.integers(0, 99))), 12, shape, 1.0, 1.0), -1)
    whole = bytearray(encode_routes(ids, 20))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decode_routes(bytes(whole), shape, 12)
    except PeerError:
        return
    assert found.max() < 20
    assert (np.diff(found.astype(int), axis=-1) > 0).all()
    assert not np.array_equal(found, ids)


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_cut_or_longer_code_is_refused(spread: float) -> None:
    shape = RouteShape(3, 2, 16)
    ids = skewed(np.random.default_rng(1), 30, shape, spread, spread)
    whole = encode_routes(ids, 16)
    for length in range(len(whole)):
        with pytest.raises(PeerError):
            decode_routes(whole[:length], shape, 30)
    for more in (b"\0", b"\0" * 8, b"\xff"):
        with pytest.raises(PeerError, match="bytes too many"):
            decode_routes(whole + more, shape, 30)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "magic: ends too soon"),
        (b"R2\0\x10\x02\x03\x1e", "not routes, or of another release"),
        (b"R1\x02\x10\x02\x03\x1e", "form: 2 is more than 1"),
        (b"R1\0\x81\x08\x02\x03\x1e", "experts: 1025 is more than 1024"),
        (b"R1\0\x02\x03\x03\x1e", "3 of 2 experts in 3 layers for 30 tokens are out of bounds"),
        (b"R1\0\x00\x00\x03\x1e", "out of bounds"),
        (b"R1\0\x10\x02\x03\x81\x80\x10", "tokens: 262145 is more than 262144"),
        (b"R1\0\x80\x08\x40\x80\x04\x80\x80\x10", "are out of bounds"),
        (b"R1\0\x10\x02\x03\x1e\xc8\x01" + bytes(200), "length: 200 is more than"),
    ],
)
def test_a_header_out_of_bounds_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(PeerError, match=says):
        read_header(data)


def test_routes_of_another_model_or_length_are_refused() -> None:
    shape = RouteShape(3, 2, 16)
    data = encode_routes(uniform(np.random.default_rng(0), 5, shape), 16)
    with pytest.raises(PeerError, match="2 of 16 experts in 3 layers, and the model has 2 of 8 experts in 3 layers"):
        decode_routes(data, RouteShape(3, 2, 8), 5)
    with pytest.raises(PeerError, match="of 5 tokens, and there are 6"):
        decode_routes(data, shape, 6)


@pytest.mark.parametrize(
    ("ids", "experts", "says"),
    [
        (np.zeros((2, 1), np.int64), 4, "of shape"),
        (np.zeros((2, 1, 1)), 4, "integers"),
        (np.full((2, 1, 1), 4), 4, "an expert outside 0 to 3"),
        (np.full((2, 1, 1), -1), 4, "an expert outside 0 to 3"),
        (np.zeros((2, 1, 2), np.int64), 4, "an expert twice"),
        (np.zeros((2, 1, 2), np.int64), 1, "out of bounds"),
        (np.zeros((MAX_TOKENS + 1, 1, 1), np.int64), 4, "out of bounds"),
    ],
)
def test_what_is_no_route_is_not_encoded(ids: NDArray[np.int64], experts: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode_routes(ids, experts)


@pytest.mark.parametrize("name", ["even", "learned"])
def test_golden(name: str) -> None:
    """Frozen bytes: they must always decode, here and by a decoder that shares no code with this one."""
    data, raw = (GOLDEN / f"routes.{name}").read_bytes(), np.load(GOLDEN / f"routes.{name}.npy")
    shape, tokens = read_header(data)
    assert data[2] == (name == "learned")
    np.testing.assert_array_equal(decode_routes(data, shape, tokens), raw)
    assert encode_routes(raw, shape.experts) == data
    assert plain_decode(data, shape, tokens) == raw.tolist()


def plain_decode(data: bytes, shape: RouteShape, tokens: int) -> list[list[list[int]]]:
    """The routes, as docs/routes.md specifies their code, with plain integers."""
    one, n = 1 << 16, shape.experts
    learned, body = data[2], data[8 if data[7] < 128 else 9 :]
    number, size, at = int.from_bytes(body + bytes(16), "big"), len(body) + 16, 8
    low, span = 0, (1 << 64) - 1

    def word(start: int, length: int) -> int:
        return number >> 8 * (size - start - length) & (1 << 8 * length) - 1

    code = word(0, 8)
    slow = [[(shape.chosen * one << 6) // n] * n for _ in range(shape.layers)]
    fast = [list(row) for row in slow]
    hit, told = [shape.chosen * one // n] * shape.layers, [shape.chosen * one // n] * shape.layers
    before: list[set[int]] = [set() for _ in range(shape.layers)]
    out = []
    for token in range(tokens):
        row = []
        for i in range(shape.layers):
            p = [min(max((7 * s + f) >> 9, 32), one - 32) for s, f in zip(slow[i], fast[i], strict=True)]
            h, g = min(max(hit[i], 32), one - 32), min(max(told[i], 32), one - 32)
            up, down = h * (one - g) >> 16, (one - h) * g >> 16
            for e in before[i]:
                a, b = p[e] * up, (one - p[e]) * down
                p[e] = min(max((a << 16) // (a + b + 1), 32), one - 32)
            chosen: set[int] = set()
            for e in range(n):
                r, m, total = shape.chosen - len(chosen), n - e, sum(p[e:])
                if r == 0 or r == m:
                    chosen |= set(range(e, n)) if r else set()
                    break
                a = p[e] * r * ((m * one - total) >> 6) >> 6
                b = (one - p[e]) * (m - r) * (total >> 6) >> 6
                share = min(max((a << 16) // (a + b + 1), 32), one - 32)
                if not learned:
                    share = min(max((r * one + m // 2) // m, 1), one - 1)
                bound = (span >> 16) * share
                if code < bound:
                    span = bound
                    chosen.add(e)
                else:
                    low, code, span = low + bound, code - bound, span - bound
                if span < 1 << 32:
                    code, span, at = code << 32 | word(at, 4), span << 32, at + 4
            hits, said = len(chosen & before[i]), sum((7 * slow[i][e] + fast[i][e]) >> 9 for e in before[i])
            step = max(one // (token + 16), one >> 10)
            for e in range(n):
                target = (e in chosen) * one << 6
                slow[i][e] += (target - slow[i][e]) * step >> 16
                fast[i][e] += (target - fast[i][e]) >> 4
            if token:
                hit[i] += (hits * one // shape.chosen - hit[i]) >> 6
                told[i] += (said // shape.chosen - told[i]) >> 6
            before[i] = chosen
            row.append(sorted(chosen))
        out.append(row)
    return out
