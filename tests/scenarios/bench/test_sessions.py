"""The benchmark of prefix reuse: its cache, and what the ledger's affinity gives under the virtual clock."""

import pytest

from scenarios.bench.sessions import BLOCK, Load, PrefixCache, measure


def test_the_cache_finds_whole_blocks_of_a_common_prefix_and_drops_the_oldest() -> None:
    cache = PrefixCache(4 * BLOCK)
    text = list(range(3 * BLOCK + 5))
    assert cache.find(text) == 0
    cache.add(text)
    assert cache.find([*text, 7, 7]) == 3 * BLOCK
    assert cache.find([*text[: BLOCK + 3], 9999, *text[BLOCK + 4 :]]) == BLOCK
    assert cache.find(text[1:]) == 0
    cache.add([99_999] * 2 * BLOCK)  # the second block of the text is the one that was used least recently
    assert cache.find(text) == BLOCK


@pytest.mark.slow
def test_turns_of_a_session_find_their_prefix() -> None:
    found = measure(Load(share=0.7, nodes=3, rows=4, sessions=24, turns=5))
    assert found.reuse >= 0.9
    assert found.hits >= 0.85
    assert found.turn_s < 2 * found.alone_s
