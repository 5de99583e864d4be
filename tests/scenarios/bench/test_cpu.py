"""The relay in C, which the product's relays are compared with: it stores and forwards every byte."""

from pathlib import Path

import pytest

from codec.errors import UsageError
from scenarios.bench.cpu import measure_c


def test_the_relay_in_c_stores_and_forwards_every_byte(tmp_path: Path) -> None:
    try:
        rows = measure_c(tmp_path, 3_000_001, 1)
    except UsageError as error:  # no compiler, or no headers of OpenSSL: the sentence says what to install
        pytest.skip(str(error))
    content = (tmp_path / "file").read_bytes()
    for store in ("store", "store2"):
        assert (tmp_path / store).read_bytes()[: len(content)] == content
    assert {row["process"] for row in rows} == {"C pusher", "C relay-forwards", "C relay-receives"}
    assert all(row["later"] >= 0 for row in rows)
