"""Whole tensors of a model in parts, and a publish of which every rank takes part to the end."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
from ranks_kit import run_ranks

from codec.errors import UsageError
from node.trainers.gathered import publish_from_rank_0


@pytest.mark.slow
@pytest.mark.long
def test_a_sharded_model_is_gathered_on_every_rank() -> None:
    for before, after, names, same in run_ranks(2, "gathered_ranks:gather"):
        assert (before, after) == (False, True)
        assert names == ["0.weight", "0.bias"], "a tied tensor once"
        assert same


class Failing:
    def publish(self, tensors: Iterator[Any], *, step: int, timeout_s: float) -> Any:
        assert (step, next(tensors)) == (3, ("a", 0))
        raise UsageError("b: another shape")


@pytest.mark.parametrize("leads", [True, False])
def test_no_rank_leaves_the_gathering_early(leads: bool) -> None:
    taken: list[str] = []
    tensors = ((name, taken.append(name) or 0) for name in "abc")
    swarm: Any = Failing() if leads else None
    if leads:
        with pytest.raises(UsageError, match="another shape"):
            publish_from_rank_0(swarm, tensors, step=3)
    else:
        assert publish_from_rank_0(swarm, tensors, step=3) is None
    assert taken == ["a", "b", "c"]
