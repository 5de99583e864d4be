"""Mutated payloads, chunks and routes cause no crash, hang or write out of bounds, and no mutated chunk is accepted.

These tests run a few thousand; `python -m scenarios.fuzz.codec --n 1000000` runs more.
"""

import pytest

from scenarios.fuzz.codec import fuzz_chunks, fuzz_payloads, fuzz_routes


@pytest.mark.parametrize("coder", ["rice", "pco", "values"])
def test_payloads(coder: str) -> None:
    result = fuzz_payloads(coder, n=2500, seed=1)
    assert result.cases == 2500
    assert result.refused > 500
    assert result.refused + result.decoded == result.cases


def test_no_mutated_chunk_is_accepted() -> None:
    result = fuzz_chunks(n=1500, seed=1)
    assert result.cases == 1500
    assert result.refused + result.decoded == result.cases
    assert result.decoded < 5  # decoded to exactly the signed bits


def test_mutated_routes_are_refused_or_are_other_routes() -> None:
    result = fuzz_routes(n=2500, seed=1)
    assert result.cases == 2500
    assert result.refused > 1000


@pytest.mark.slow
@pytest.mark.long
def test_ten_thousand_more() -> None:
    for coder in ("rice", "pco", "values"):
        assert fuzz_payloads(coder, n=10_000, seed=2).cases == 10_000
    assert fuzz_chunks(n=10_000, seed=2).cases == 10_000
