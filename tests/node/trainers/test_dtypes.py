"""A model's dtype that differs from the checkpoint's is converted as torch does it, or refused when attaching."""

from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from codec import Layout, TensorSpec  # noqa: E402
from codec.errors import UsageError  # noqa: E402
from node.trainers.ranks.copies import Copies  # noqa: E402
from node.trainers.ranks.ownership import Ownership  # noqa: E402
from node.trainers.tensors.weights import Copier, check_names  # noqa: E402

KINDS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ACCEPTED = {("BF16", "F32"), ("F16", "F32"), ("F32", "BF16"), ("F32", "F16"), *((kind, kind) for kind in KINDS)}
"""(checkpoint dtype, trainer dtype)."""


def model(kind: Any, scale: float = 1.0) -> Any:
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 8)
    with torch.no_grad():
        linear.weight *= scale
    return linear.to(kind)


def layout(kind: str) -> Layout:
    return Layout((TensorSpec("bias", kind, (8,)), TensorSpec("weight", kind, (8, 16))))


def published(base: Layout, source: Any) -> np.ndarray:
    copies = Copies.create(base, 1)
    Copier(base, copies, Ownership.alone(base), 0).fill(0, 1, source)
    return copies.tensor(0, base.tensor("weight"))


@pytest.mark.parametrize(("stored", "held"), list(product(KINDS, KINDS)))
def test_each_pair_of_dtypes(stored: str, held: str) -> None:
    source = model(KINDS[held])
    if (stored, held) not in ACCEPTED:
        with pytest.raises(UsageError, match=f"torch.{str(KINDS[held])[6:]} in the model and {stored}.*train in"):
            check_names(layout(stored), source)
        return
    check_names(layout(stored), source)
    wanted = source.weight.detach().to(KINDS[stored]).view(torch.uint8).numpy().reshape(-1)
    np.testing.assert_array_equal(published(layout(stored), source), wanted)


def test_values_beyond_float16_are_refused() -> None:
    with pytest.raises(UsageError, match=r"weight has values beyond float16's 65,504"):
        published(layout("F16"), model(torch.float32, scale=1e7))


def test_a_tie_that_only_the_model_has_is_published_once() -> None:
    """The heads of GPT-NeoX and Mamba are tied and the checkpoint does not name them: one tensor is published once."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, state_size=4, expand=1)
    source = transformers.MambaForCausalLM(config)
    state = source.state_dict()
    specs = [TensorSpec(name, "F32", tuple(t.shape)) for name, t in sorted(state.items()) if name != "lm_head.weight"]
    base = Layout(tuple(specs))
    assert set(check_names(base, source)) == {spec.name for spec in specs}
    source.lm_head.weight = torch.nn.Parameter(source.lm_head.weight.detach().clone())
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        check_names(base, source)
