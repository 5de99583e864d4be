"""Assignment: nobody can foresee it, everybody can verify it, and it costs what it may."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.verification.assignment import (
    FIRST,
    PANEL,
    check_share,
    checkers,
    commitment,
    framed,
    is_checked,
    most_checked,
    nonce_of,
    opens,
    panel,
    wants_more,
)
from node.verification.classes import ArithmeticClass

SECRET = bytes(range(32))
CPU = ArithmeticClass("transformers", "5.0", "cpu", "float32", "sdpa")
GPU = ArithmeticClass("vllm", "0.32", "NVIDIA H100", "bfloat16", "flash")
NODES = {bytes([i]) * 32: CPU if i % 2 else GPU for i in range(10)}


def test_a_nonce_opens_its_own_commitment_only():
    first, second = nonce_of(SECRET, 1), nonce_of(SECRET, 2)
    assert first != second
    assert opens(first, commitment(first))
    assert not opens(second, commitment(first))


def test_the_share_that_is_checked_is_the_share_that_was_asked():
    nonce = nonce_of(SECRET, 1)
    checked = [is_checked(nonce, b"%d" % i, 0.02) for i in range(20_000)]
    assert sum(checked) / len(checked) == pytest.approx(0.02, abs=0.004)
    assert all(is_checked(nonce, b"%d" % i, 1.0) for i in range(100))
    assert not any(is_checked(nonce, b"%d" % i, 0.0) for i in range(100))


@given(st.binary(min_size=1, max_size=50), st.integers(0, 9))
def test_the_author_and_suspects_never_check_and_its_own_class_comes_first(signed, number):
    author, suspect = bytes([number]) * 32, bytes([(number + 2) % 10]) * 32
    order = checkers(nonce_of(SECRET, 7), signed, author, NODES, [suspect])
    assert sorted(order) == sorted(set(NODES) - {author, suspect})
    same = [NODES[node] == NODES[author] for node in order]
    assert same == sorted(same, reverse=True)
    assert order == checkers(nonce_of(SECRET, 7), signed, author, NODES, [suspect])


def test_every_node_of_the_class_comes_first_equally_often():
    author = bytes([0]) * 32
    firsts = [checkers(nonce_of(SECRET, 3), b"%d" % i, author, NODES)[0] for i in range(4_000)]
    counts = [firsts.count(node) for node in NODES if NODES[node] == GPU and node != author]
    assert sum(counts) == 4_000
    assert min(counts) > 850


def test_a_new_node_is_checked_fully_and_an_old_one_at_most_at_two_percent_on_the_whole():
    shares = np.array([check_share(n) for n in range(100_000)])
    assert (shares[:FIRST] == 1).all()
    assert (np.diff(shares) <= 0).all()
    assert shares.sum() <= most_checked(100_000)
    assert shares[:20_000].sum() <= 0.02 * 20_000
    assert shares[-1] == pytest.approx(0.01, abs=1e-3)


@given(st.integers(0, 10**6), st.floats(-1, 30), st.floats(0, 5))
def test_more_evidence_never_means_fewer_checks(samples, evidence, more):
    assert check_share(samples, evidence) <= check_share(samples, evidence + more) <= 1.0


def test_the_bound_on_colluders():
    assert framed(0, 10, 3) == 0.0
    assert framed(1, 10, 3) == 0.0
    assert framed(2, 10, 3) == framed(2, 10, 5) == 0.0, "two colluders never suffice"
    assert framed(3, 10, 3) == pytest.approx(1 / 120)
    assert framed(3, 10, 5) == pytest.approx(21 / 252)
    assert framed(10, 10, 3) == 1.0
    assert framed(5, 10, 5) == pytest.approx(sum(math.comb(5, k) * math.comb(5, 5 - k) for k in (3, 4, 5)) / 252)


def test_a_panel_is_of_the_authors_class_where_that_has_three_others():
    author = bytes([0]) * 32
    chosen = panel(SECRET, author, NODES)
    assert len(chosen) == 4
    assert all(NODES[node] == GPU for node in chosen)
    few = {node: kind for node, kind in NODES.items() if kind == CPU or node in (author, bytes([2]) * 32)}
    assert len(panel(SECRET, author, few)) == 6, "its class has only one other, so all are asked"
    assert author not in panel(SECRET, author, few)
    assert not {bytes([2]) * 32, bytes([4]) * 32} & set(
        panel(SECRET, author, NODES, [bytes([2]) * 32, bytes([4]) * 32])
    )


@given(st.integers(0, 99))
def test_a_panel_stays_when_other_nodes_come_and_go(gone):
    nodes = {bytes([i]) * 32: CPU for i in range(100)}
    author = bytes([7]) * 32
    before = panel(SECRET, author, nodes)
    assert len(before) == PANEL
    after = panel(
        SECRET, author, {node: kind for node, kind in nodes.items() if node != bytes([gone]) * 32 or gone == 7}
    )
    assert len(set(before) - set(after)) == (bytes([gone]) * 32 in before)
    assert panel(bytes(32), author, nodes) != before, "without the secret nobody knows it"


def test_one_check_in_sixteen_compares_the_checkers_and_one_in_four_at_first():
    nonce = nonce_of(SECRET, 2)
    assert sum(wants_more(nonce, b"%d" % i, 1000) for i in range(16_000)) == pytest.approx(1000, abs=150)
    assert sum(wants_more(nonce, b"%d" % i, 10) for i in range(16_000)) == pytest.approx(4000, abs=300)


def test_the_cost_is_two_percent_of_an_established_nodes_samples_with_all_opinions():
    """One opinion for each check, three for one in sixteen: 1.125 opinions a check."""
    opinions = most_checked(50_000) * (1 + 2 / 16)
    assert opinions <= 0.02 * 50_000


@pytest.mark.parametrize(
    ("abilities", "kind", "wanted"),
    [
        ({"options", "class:" + CPU.name}, "transformers/x/cpu", CPU),
        ({"class:" + GPU.name}, "", GPU),
        ({"options"}, "vllm/0.32.0/gpu", ArithmeticClass("vllm", "0.32.0", "gpu", "", "")),
        (set(), "", ArithmeticClass("", "", "", "", "")),
        ({"class:a/b/c/d/e/f/tp99999"}, "", ArithmeticClass("a", "b", "c", "d", "e/f/tp99999")),
    ],
)
def test_a_class_is_read_from_what_a_node_names(abilities, kind, wanted):
    assert ArithmeticClass.named(abilities, kind) == wanted
