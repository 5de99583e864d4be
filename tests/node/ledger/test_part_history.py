"""What each version changed, and the lags that follow from it."""

import random

import pytest

from node.ledger import part_history
from node.ledger.part_history import BASE, WHOLE, Change, PartHistory, Record, no_adapter


def step(name: str, adapters: dict[str, int]) -> Change:
    """One more version of the adapter `name`."""
    adapters[name] = adapters.get(name, 0) + 1
    return Change(base=False, changed=frozenset({name}), adapters=dict(adapters))


def test_without_adapters_lag_is_the_difference_of_version_numbers():
    history = PartHistory()
    for version in range(1, 20):
        history.note((0, version))
        assert history.newest is None, "nothing to keep"
    for version in range(20):
        assert history.since(BASE, (0, version), (0, 19)) == 19 - version
        assert history.own(BASE, (0, version)) == version
    assert history.oldest(BASE, (0, 19), 3) == (0, 16)
    assert history.oldest(BASE, (0, 2), 3) == (0, 0)
    assert len(history) == 0


def test_versions_of_other_adapters_make_nothing_older():
    history, adapters = PartHistory(), {}
    for number, name in enumerate("aabbbba", 1):
        history.note((0, number), step(name, adapters))
    assert history.since("a", (0, 2), (0, 6)) == 0
    assert history.since("a", (0, 2), (0, 7)) == 1
    assert history.since("b", (0, 2), (0, 7)) == 4
    assert history.since(BASE, (0, 0), (0, 7)) == 0
    assert history.oldest("a", (0, 6), 0) == (0, 2)
    assert history.oldest("a", (0, 7), 1) == (0, 2)
    assert history.oldest(BASE, (0, 7), 0) == (0, 0)
    history.note((0, 8), WHOLE._replace(adapters=adapters))
    assert history.since("a", (0, 7), (0, 8)) == history.since(BASE, (0, 0), (0, 8)) == 1, "the base ages all"
    assert history.since("a", (0, 7), (0, 10)) == 3, "what is not sealed yet may change everything"
    assert history.same("a", (0, 2), (0, 6))
    assert history.same("a", (0, 6), (0, 2))
    assert not history.same("b", (0, 2), (0, 6))
    assert not history.same("a", (0, 2), (1, 2))
    assert history.changes_base((0, 8))
    assert not history.changes_base((0, 7))


@pytest.mark.parametrize("seed", range(5))
def test_lags_and_own_versions_are_those_of_a_plain_count(seed):
    rng = random.Random(seed)
    history, adapters, changes = PartHistory(), {}, [WHOLE]
    for number in range(1, 200):
        change = WHOLE._replace(adapters=dict(adapters)) if rng.random() < 0.1 else step(rng.choice("abcd"), adapters)
        changes.append(change)
        history.note((0, number), change)
    for _ in range(500):
        part, low, high = rng.choice(["", *"abcd"]), *sorted(rng.choices(range(200), k=2))
        ages = [change.ages(part) for change in changes[low + 1 : high + 1]]
        assert history.since(part, (0, low), (0, high)) == sum(ages)
        lag = rng.randrange(4)
        _, oldest = history.oldest(part, (0, high), lag)
        assert sum(change.ages(part) for change in changes[oldest + 1 : high + 1]) <= lag
        assert oldest == 0 or sum(change.ages(part) for change in changes[oldest : high + 1]) > lag
        if part:
            assert history.own(part, (0, high)) == changes[high].adapters.get(part, 0)
        else:
            assert history.own(part, (0, high)) == sum(change.base for change in changes[1 : high + 1])


def test_a_removed_adapters_name_is_used_again():
    """Tokens of the adapter that had it before are older by its removal and by each version since."""
    history = PartHistory()
    changes = [{"a": 1}, {"a": 2}, {}, {"a": 1}, {"a": 2}]
    for number, adapters in enumerate(changes, 1):
        history.note((0, number), Change(base=False, changed=frozenset({"a"}), adapters=adapters))
    assert [history.own("a", (0, number)) for number in range(1, 6)] == [1, 2, 0, 1, 2]
    assert history.since("a", (0, 2), (0, 4)) == 2
    assert not history.same("a", (0, 1), (0, 4)), "equal numbers of its own, and other bits"
    assert history.since(BASE, (0, 0), (0, 5)) == 0


def test_a_return_to_an_older_version_changes_everything():
    history, adapters = PartHistory(), {}
    for number in range(1, 4):
        history.note((0, number), step("a", adapters))
    history.note((1, 2), WHOLE._replace(adapters={"a": 2}))
    assert history.adapters == {"a": 2}
    assert history.own("a", (1, 2)) == 2
    assert history.own("a", (0, 3)) == 0, "of another epoch"
    assert history.own(BASE, (1, 2)) == 0, "no version has changed the base"
    history.note((1, 3), step("a", {"a": 2}))
    assert history.since("a", (1, 2), (1, 3)) == 1
    assert history.own("a", (1, 3)) == 3


def test_the_record_is_bounded_and_what_is_forgotten_is_too_old(monkeypatch):
    monkeypatch.setattr(part_history, "KEPT", 50)
    history, adapters = PartHistory(), {}
    for number in range(1, 1001):
        history.note((0, number), step(f"a{number % 3}", adapters))
    assert len(history) == 50
    assert history.since(BASE, (0, 960), (0, 1000)) == 0
    assert history.since(BASE, (0, 0), (0, 1000)) == 950
    assert history.own(BASE, (0, 1000)) == 0
    assert history.own("a1", (0, 1000)) == adapters["a1"]
    assert sum(map(len, history._own.values())) <= 3 * 2 * 50
    gone = {"a0": adapters["a0"]}
    for number in range(1001, 1100):
        history.note((0, number), Change(base=False, adapters=gone))
    assert set(history._own) == {"a0"}, "an adapter that was removed is forgotten"


@pytest.mark.parametrize("epoch", [0, 1])
def test_what_the_book_keeps_restores_the_history(epoch):
    rng = random.Random(3)
    history, adapters, rows = PartHistory(), {}, []
    for number in range(1, 100):
        whole = rng.random() < 0.2
        history.note(
            (0, number), WHOLE._replace(adapters=dict(adapters)) if whole else step("abc"[number % 3], adapters)
        )
        rows += [history.newest] if history.newest else []
    if epoch:
        history.note((1, 40), WHOLE._replace(adapters=dict(adapters)))
        rows += [history.newest]
        history.note((1, 41), step("b", adapters))
        rows += [history.newest]
    again = PartHistory((9, 9))
    again.restore(history.head, rows, history.adapters, history.quiet_before)
    assert again.adapters == history.adapters
    head = history.head
    for part in ("", "a", "b"):
        for version in range(head[1] + 1):
            assert again.since(part, (epoch, version), head) == history.since(part, (epoch, version), head)
            assert again.own(part, (epoch, version)) == history.own(part, (epoch, version))


def test_the_same_version_again_changes_nothing():
    history = PartHistory()
    history.note((0, 1), step("a", {}))
    history.note((0, 1), step("a", {}))
    assert len(history) == history.quiet_before == 1
    assert history.newest is None
    history.set_adapters({"a": 7})
    assert history.own("a", (0, 1)) == 7


def test_a_sentence_names_the_adapters_that_there_are():
    assert "'x'" in no_adapter("x", ["b", "a"])
    assert "a, b" in no_adapter("x", ["b", "a"])
    assert "none" in no_adapter("x", [])
    assert Record((0, 1), False, {}).version == (0, 1)
