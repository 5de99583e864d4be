"""What the ledger remembers for a while, against a dictionary in the order in which keys were set."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.ledger.recent import Recent


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 255))))
def test_it_is_a_dictionary_that_forgets_the_oldest(most: int, pairs: list[tuple[int, int]]) -> None:
    recent, expected = Recent(most, 2, 1), OrderedDict[int, int]()
    for key, value in pairs:
        recent.set(key.to_bytes(2), bytes([value]))
        expected[key] = value
        while len(expected) > most:
            expected.popitem(last=False)
        assert len(recent) == len(expected)
        for each in range(21):
            found = recent.get(each.to_bytes(2))
            assert found == (bytes([expected[each]]) if each in expected else None)


def test_many_keys_over_many_rounds() -> None:
    recent, chance = Recent(1000, 16, 17), random.Random(1)
    keys = [chance.randbytes(16) for _ in range(5000)]
    for number, key in enumerate(keys):
        recent.set(key, number.to_bytes(17))
    assert len(recent) == 1000
    assert [recent.get(key) for key in keys] == [None] * 4000 + [number.to_bytes(17) for number in range(4000, 5000)]


def test_an_entry_takes_little_more_than_its_bytes() -> None:
    recent = Recent(1 << 16, 16, 17)
    for number in range(1 << 16):
        recent.set(number.to_bytes(16), bytes(17))
    used = len(recent._keys) + len(recent._values) + len(recent._table) * recent._table.itemsize
    assert used <= (16 + 17 + 8) << 16


def test_a_key_or_value_of_another_size_is_refused() -> None:
    recent = Recent(4, 2, 1)
    for key, value in ((b"k", b"v"), (b"key", b"v"), (b"ke", b""), (b"ke", b"va")):
        with pytest.raises(ValueError, match="a key of"):
            recent.set(key, value)
    assert len(recent) == 0
