"""Importance weights against their formulas, in numpy and torch."""

import math

import numpy as np
import pytest

from codec.errors import UsageError
from node import Rollout, effective_share, importance_weights, log_ratios_by_version
from node.engines.base import Span

OLD = np.log(np.array([[0.5, 0.25, 0.1], [0.2, 0.4, 0.8]], np.float32))
NEW = np.log(np.array([[0.25, 0.5, 0.9], [0.2, 0.1, 0.4]], np.float32))
RATIO = [[0.5, 2.0, 9.0], [1.0, 0.25, 0.5]]


def test_each_tokens_ratio_is_truncated() -> None:
    found = importance_weights(NEW, OLD, bound=3.0)
    assert found.dtype == np.float32
    assert found == pytest.approx(np.minimum(RATIO, 3.0), rel=1e-5)
    assert importance_weights(NEW, OLD, bound=100.0) == pytest.approx(np.array(RATIO), rel=1e-5)
    assert importance_weights(OLD, OLD) == pytest.approx(np.ones((2, 3)))


def test_a_sequence_has_the_product_of_its_tokens_that_count() -> None:
    found = importance_weights(NEW, OLD, bound=100.0, of="sequence")
    assert found == pytest.approx(np.array([[9.0] * 3, [0.125] * 3]), rel=1e-5)
    mask = np.array([[True, True, False], [True, False, True]])
    found = importance_weights(NEW, OLD, bound=100.0, mask=mask, of="sequence")
    assert found == pytest.approx(np.array([[1.0, 1.0, 0.0], [0.5, 0.0, 0.5]]), rel=1e-5)


def test_padding_and_impossible_tokens_give_numbers() -> None:
    new, old = np.array([-np.inf, -1.0, -200.0]), np.array([-np.inf, -1.0, -1.0])
    mask = np.array([False, True, True])
    found = importance_weights(new, old, mask=mask)
    assert found[:2].tolist() == [0.0, 1.0]
    assert 0.0 < found[2] < 1e-30
    assert importance_weights(old[2:], new[2:], bound=1e30).tolist() == [pytest.approx(1e30)]


def test_torch_has_the_same_values_and_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    mask = np.array([[True, True, False], [True, False, True]])
    for of in ("token", "sequence"):
        new = torch.tensor(NEW, requires_grad=True)
        found = importance_weights(new, torch.tensor(OLD), bound=1.5, mask=torch.tensor(mask), of=of)
        assert found.dtype == torch.float32
        assert found.detach().numpy() == pytest.approx(importance_weights(NEW, OLD, bound=1.5, mask=mask, of=of))
        found.sum().backward()
        assert new.grad is not None
        assert bool(torch.isfinite(new.grad).all())
        assert new.grad[~torch.tensor(mask)].tolist() == [0.0, 0.0]
    assert effective_share(found, torch.tensor(mask)) == pytest.approx(effective_share(found.detach().numpy(), mask))


def test_the_effective_share() -> None:
    assert effective_share(np.full(7, 0.3)) == pytest.approx(1.0)
    assert effective_share(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_share(np.array([1.0, 5.0]), np.array([True, False])) == 1.0
    with pytest.raises(UsageError, match="no weight"):
        effective_share(np.zeros(3))


def test_log_ratios_by_version() -> None:
    spans = (Span((0, 4), 0, 2), Span((0, 5), 2, 3))
    rollout = Rollout((1, 2, 3), (-1.0, -2.0, -3.0), "length", spans, bytes(32))
    found = log_ratios_by_version(rollout, [-1.5, -2.1, -3.0])
    assert list(found) == [(0, 4), (0, 5)]
    assert found[0, 4] == pytest.approx(-0.3)
    assert found[0, 5] == 0.0
    with pytest.raises(UsageError, match="2 values for 3 tokens"):
        log_ratios_by_version(rollout, [0.0, 0.0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"old": OLD[:1]}, "shapes"),
        ({"bound": 0.0}, "bound"),
        ({"bound": math.nan}, "bound"),
        ({"of": "group"}, "of is"),
    ],
)
def test_a_wrong_argument_is_refused(change: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        importance_weights(**({"new": NEW, "old": OLD} | change))
