"""A policy and its draft model, which a trainer publishes as one version."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from codec.errors import UsageError
from codec.layout import Layout
from codec.parts import draft_layout, draft_name
from node.trainers.tensors.naming import HeldTensor, Naming

__all__ = ["NO_DRAFT", "DraftNaming", "Drafted"]

NO_DRAFT: Final = "This swarm carries no draft model: start its seed with --draft FOLDER, or publish without."


class Drafted(NamedTuple):
    """What a trainer publishes. `draft`: a source of tensors as `model` is, by the names of the draft's checkpoint."""

    model: Any
    draft: Any


class DraftNaming:
    """Brings the tensors of a draft model under their names in the layout of the whole model.

    `names`: all of them; empty for a layout without a draft.
    """

    def __init__(self, layout: Layout) -> None:
        own = draft_layout(layout)
        self._own = own
        self._naming = None if own is None else Naming(own)
        self.names = frozenset(() if own is None else (draft_name(spec.name) for spec in own.tensors))

    def held(self, draft: Any) -> Iterator[HeldTensor]:
        """Every tensor of `draft`. Raises `UsageError` naming one that the swarm's draft model does not have, or that
        is sharded over ranks: rank 0 publishes the draft, and holds all of it."""
        if self._own is None or self._naming is None:
            raise UsageError(NO_DRAFT)
        for tensor in self._naming.held(draft):
            if tensor.part is not None:
                raise UsageError(
                    f"{tensor.name} of the draft model is sharded over ranks: give rank 0 all of it, as a mapping of "
                    "names to gathered tensors."
                )
            try:
                spec = self._own.tensor(tensor.name)
            except KeyError:
                spec = None
            if spec is None or tensor.shape != spec.shape:
                has = "lacks" if spec is None else f"has as {spec.shape}"
                raise UsageError(
                    f"The draft model has a tensor {tensor.name} of shape {tensor.shape}, which the swarm's draft "
                    f"{has}: publish a draft with the tensors of the folder that the seed was started with (--draft)."
                )
            yield replace(tensor, name=draft_name(tensor.name))

    def unused(self, draft: Any) -> frozenset[str]:
        """Names in the whole layout of the draft's tensors that the model's class does not use. They stay as they
        are."""
        return frozenset() if self._naming is None else frozenset(map(draft_name, self._naming.unused(draft)))
