"""A Megatron model as Megatron's training loop holds it: a list of one, in wrappers that prefix its names."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from standing_kit import standing_in

from codec.errors import UsageError

NAMES = ("model.embed_tokens.weight", "model.norm.weight")


class Wrapper(torch.nn.Module):
    """As Float16Module and DistributedDataParallel hold a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


def model(stages: int = 1, name: str = "word_embeddings") -> Any:
    """What of a GPTModel is outside its layers."""
    found = torch.nn.Module()
    found.config = SimpleNamespace(pipeline_model_parallel_size=stages)
    found.embedding, found.decoder = torch.nn.Module(), torch.nn.Module()
    setattr(found.embedding, name, torch.nn.Embedding(6, 2))
    found.decoder.final_layernorm = torch.nn.LayerNorm(2, bias=False)
    return found


@pytest.fixture
def checkpoint_tensors() -> Iterator[Any]:
    state = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 1)
    with standing_in("node.trainers.megatron", megatron__core={"parallel_state": state}) as megatron:
        yield megatron.checkpoint_tensors


@pytest.mark.parametrize("wrappers", [0, 1, 2, 3])
@pytest.mark.parametrize("as_list", [False, True])
def test_wrappers_and_the_list_of_one_change_nothing(checkpoint_tensors: Any, wrappers: int, as_list: bool) -> None:
    bare = model()
    wrapped = bare
    for _ in range(wrappers):
        wrapped = Wrapper(wrapped)
    found = dict(checkpoint_tensors([wrapped] if as_list else wrapped, vocabulary=5))
    assert tuple(found) == NAMES
    assert torch.equal(found[NAMES[0]], bare.embedding.word_embeddings.weight[:5]), "without Megatron's padding"


def test_a_compiled_model_in_a_wrapper_is_the_model(checkpoint_tensors: Any) -> None:
    compiled = torch.nn.Module()
    compiled._orig_mod = Wrapper(model())
    assert tuple(dict(checkpoint_tensors([compiled], vocabulary=6))) == NAMES


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: [model(), model()], "2 models.*virtual pipeline"),
        (list, "no model"),
        (lambda: Wrapper(model(stages=2)), "pipeline stage"),
        (lambda: Wrapper(Wrapper(model(name="position_embeddings"))), "^embedding.position_embeddings.weight: "),
        (lambda: {"a": 1}, "GPTModel"),
    ],
    ids=["virtual pipeline", "an empty list", "a pipeline stage", "an unknown parameter", "no model"],
)  # fmt: skip
def test_what_is_refused_says_why(checkpoint_tensors: Any, given: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        list(checkpoint_tensors(given(), vocabulary=6))
