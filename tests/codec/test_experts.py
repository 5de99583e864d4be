"""Changes of each expert: stored one by one, or all in one tensor, against counting element by element."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec import Layout, TensorSpec
from codec.experts import ExpertChanges, Experts
from codec.layout import BLOCK_ELEMENTS

SIZES = st.sampled_from([1, 3, 700, 1024, 1500])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Experts one by one in a layer, in one tensor in another, and tensors that are of no expert."""
    tensors = [TensorSpec("layers.0.q_proj", "BF16", (40, 1024)), TensorSpec("layers.0.gate", "BF16", (4, 1024))]
    for expert in range(draw(st.integers(0, 4))):
        tensors.append(TensorSpec(f"layers.0.experts.{expert}.up.weight", "BF16", (draw(SIZES), 1024)))
        tensors.append(TensorSpec(f"layers.0.experts.{expert}.down.weight", "F32", (draw(SIZES), 1000)))
    if draw(st.booleans()):
        tensors.append(TensorSpec("layers.1.experts.gate_up", "BF16", (draw(st.integers(1, 9)), draw(SIZES), 1000)))
    return Layout(tuple(sorted(tensors, key=lambda tensor: tensor.name)))


def expert_of(tensor: TensorSpec, element: int) -> tuple[str, int] | None:
    if ".experts." not in tensor.name:
        return None
    layer, _, rest = tensor.name.partition(".experts.")
    number = rest.split(".")[0]
    return (layer, int(number)) if number.isdigit() else (layer, element // (tensor.elements // tensor.shape[0]))


@given(layouts(), st.integers(0, 1 << 32))
def test_changes_are_counted_for_their_expert(layout: Layout, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = Experts(layout)
    changes = ExpertChanges(experts)
    wanted: dict[tuple[str, int], int] = {}
    for block in range(layout.n_blocks):
        spec = layout.block(block)
        positions = np.unique(rng.integers(0, spec.count, 7)).astype(np.uint32)
        if rng.random() < 0.3:
            continue
        changes.add(block, positions)
        for position in positions.tolist():
            found = expert_of(layout.tensors[spec.tensor], spec.start + position)
            if found is not None:
                wanted[found] = wanted.get(found, 0) + 1
    counted = {
        (layer, expert): int(count)
        for layer, counts in changes.changed.items()
        for expert, count in enumerate(counts)
        if count
    }
    assert counted == wanted
    assert changes.touched == len(wanted)
    assert bool(experts) == any(".experts." in tensor.name for tensor in layout.tensors)
    total = sum(tensor.elements for tensor in layout.tensors if ".experts." in tensor.name)
    assert sum(int(elements.sum()) for elements in experts.elements.values()) == total
    if experts:
        spread = changes.spread()
        assert (spread.count, spread.touched, spread.untouched) == (
            experts.count, len(wanted), experts.count - len(wanted),
        )  # fmt: skip
        assert 0 <= spread.min <= spread.median <= spread.max <= 1


def test_a_block_whose_changes_are_not_known_counts_whole() -> None:
    layout = Layout((TensorSpec("a.experts.w", "BF16", (5, 300, 1000)),))
    changes = ExpertChanges(Experts(layout))
    changes.add(1, None)
    first = BLOCK_ELEMENTS
    edges = [min(max(edge * 300_000, first), 1_500_000) for edge in range(6)]
    assert changes.changed["a"].tolist() == [after - before for before, after in pairwise(edges)]
    assert changes.touched == 2


def test_names_that_are_of_no_expert() -> None:
    odd = ("a.experts.bias", "a.experts.99999999.w", "a.experts.empty", "a.shared_experts.w", "experts.0.w")
    shapes = ((4,), (4, 4), (0, 4), (4, 4), (4, 4))
    layout = Layout(tuple(TensorSpec(n, "BF16", s) for n, s in sorted(zip(odd, shapes, strict=True))))
    experts = Experts(layout)
    assert not experts
    changes = ExpertChanges(experts)
    changes.add(0, np.array([0], np.uint32))
    assert changes.touched == 0
    with pytest.raises(ValueError, match="no experts"):
        changes.spread()
