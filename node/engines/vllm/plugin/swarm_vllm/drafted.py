"""The draft model beside the policy: both in one, so that a version is mapped, written and proven in both together.

The draft's tensors have the names that they have in the swarm's layout, which begin with `PREFIX`. vLLM gives a
weight-transfer engine the policy's model only, so the loader notes the draft model that it has filled.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from .messages import Tensor

__all__ = ["PREFIX", "both", "of_draft", "of_policy", "reload"]

PREFIX = "~_draft/"
"""As in `codec.parts`."""
_MODULE = "~draft"
"""The draft's place among the policy's modules. No model has a module of this name."""

Pairs = Iterable[tuple[str, torch.Tensor]]


def of_policy(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that are not the draft's."""
    return tuple(tensor for tensor in tensors if not tensor.names[0].startswith(PREFIX))


def of_draft(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The draft's tensors, under the names of its own checkpoint."""
    return tuple(
        Tensor(tuple(name[len(PREFIX) :] for name in tensor.names), tensor.dtype, tensor.shape, tensor.offset)
        for tensor in tensors
        if tensor.names[0].startswith(PREFIX)
    )


class _Both(torch.nn.Module):
    """A policy and its draft model. The policy's modules keep their names."""

    def __init__(self, policy: Any, draft: Any) -> None:  # vLLM's models, which have `load_weights`
        super().__init__()
        self._modules = {**policy._modules, _MODULE: draft}
        self._parameters, self._buffers = policy._parameters, policy._buffers
        self._loaders = (policy.load_weights, draft.load_weights)

    def load_weights(self, pairs: Pairs) -> None:
        """Each pair goes to the loader of its model."""
        policy, draft = self._loaders
        reload(pairs, policy, draft)


def both(policy: torch.nn.Module, draft: torch.nn.Module | None) -> Any:
    """The two as one model for `LiveWeights`; the policy itself without a draft."""
    return policy if draft is None else _Both(policy, draft)


def reload(pairs: Pairs, policy: Callable[[Pairs], Any], draft: Callable[[Pairs], Any] | None) -> None:
    """Give the weights to the loaders of both models. The draft's come after the policy's, as in the layout."""
    left = iter(pairs)
    first: list[tuple[str, torch.Tensor]] = []

    def before() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in left:
            if name.startswith(PREFIX):
                first.append((name, weight))
                return
            yield name, weight

    begun = next(policies := before(), None)
    if begun is not None:
        policy(chain((begun,), policies))
    if first:
        if draft is None:
            raise ValueError("this vLLM has no draft model to load")
        draft((name[len(PREFIX) :], weight) for name, weight in chain(first, left))
