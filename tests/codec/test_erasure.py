"""The erasure code: any k of n fragments give the content back."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.erasure import join_fragments, parity


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 3), (2, 4), (3, 5), (4, 8)])
def test_every_choice_of_k_fragments_gives_the_content_back(k: int, n: int) -> None:
    parts = [bytes((17 * part + 5 * at) % 256 for at in range(40)) for part in range(k)]
    fragments = dict(enumerate([*parts, *parity(parts, n)]))
    for chosen in combinations(range(n), k):
        assert join_fragments({number: fragments[number] for number in chosen}, k) == parts, chosen


@given(data=st.data(), k=st.integers(1, 16), extra=st.integers(0, 16), length=st.integers(1, 300))
def test_any_fragments_of_any_code(data: st.DataObject, k: int, extra: int, length: int) -> None:
    parts = [data.draw(st.binary(min_size=length, max_size=length)) for _ in range(k)]
    fragments = [*parts, *parity(parts, k + extra)]
    chosen = data.draw(st.permutations(range(k + extra)))[:k]
    assert join_fragments({number: memoryview(fragments[number]) for number in chosen}, k) == parts


def test_the_fragments_of_a_content_stay_the_same() -> None:
    """They are signed and lie on disks, so another release has to compute the same ones."""
    assert [each.hex() for each in parity([b"\x01\x02\x03", b"\x80\x00\xff"], 4)] == ["0501da", "b4f5f0"]


def test_a_wrong_fragment_makes_the_content_wrong() -> None:
    parts = [b"left part", b"the right"]
    (third,) = parity(parts, 3)
    assert join_fragments({1: parts[1], 2: third}, 2) == parts
    assert join_fragments({1: parts[1], 2: bytes([third[0] ^ 1]) + third[1:]}, 2) != parts
