"""The benchmark of streams: each token of each stream is found at its client, after it was drawn."""

from scenarios.bench.streams import measure


def test_each_token_is_measured_once() -> None:
    first, every = measure(3, 5, 50.0)
    assert (len(first), len(every)) == (3, 15)
    assert all(0.0 < seconds < 10.0 for seconds in every)
