"""`--load-format swarm`: vLLM's first load takes its weights from the replica, so a node needs no checkpoint on disk.

It uses the model's own loaders and vLLM's own processing, like any load, so memory afterwards holds what a load leaves,
and the map can be proven against it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import os
from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from . import drafted, proposed
from .channel import connect
from .messages import Did, FromDriver, Loader, Model, Tensor
from .shared import map_sealed
from .sources import DTYPES, ReplicaSource
from .trace import Storages, trace

__all__ = ["SwarmLoader", "draft_model", "first_load"]

first_load: dict[str, bytes] = {}
"""By tensor: BLAKE3 of its blocks, concatenated, as this process loaded them first."""
draft_model: Any = None
"""The draft model that this process has loaded from the replica; None: it has none."""


@register_model_loader("swarm")
class SwarmLoader(BaseModelLoader):
    """Configured by `--model-loader-extra-config '{"socket": "/path/of/the/driver"}'`. `draft` in it: the folder of the
    draft model's config, for a vLLM that is to load the swarm's draft too."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: Any, model_config: Any) -> None:
        extra = self.load_config.model_loader_extra_config
        is_draft = model_config.model == extra.get("draft")
        channel = connect(extra["socket"], FromDriver)
        try:
            channel.send(Loader(os.getpid()))
            message, fds = channel.recv()
            assert isinstance(message, Model)
            source = ReplicaSource(map_sealed(fds[0]), message.block_elements)
            if is_draft:
                global draft_model
                draft_model = model
                if current_platform.is_cpu():
                    proposed.install()
                model.load_weights(_weights(model, source, drafted.of_draft(message.tensors), drafted.PREFIX))
            else:
                first_load.clear()
                model.load_weights(_weights(model, source, drafted.of_policy(message.tensors)))
            channel.send(Did(message.number))
        finally:
            channel.close()


def _weights(model: Any, source: ReplicaSource, tensors: tuple[Tensor, ...], prefix: str = "") -> Any:
    """`prefix`: of their names in `first_load`."""
    taken = {tensor.names[0]: _names_taken(model, tensor) for tensor in tensors if len(tensor.names) > 1}
    for tensor in tensors:
        weight, first_load[prefix + tensor.names[0]] = source.read(tensor)
        for name in taken.get(tensor.names[0], tensor.names):
            yield name, weight


def _names_taken(model: Any, tensor: Tensor) -> tuple[str, ...]:
    """Those of a tied tensor's names that the model's loader accepts. An unknown one (Gemma 2's head) ends the load."""
    try:
        found = trace(model.load_weights, Storages(model), tensor.names, tensor.shape, DTYPES[tensor.dtype])
    except Exception:  # it accepts no probe; a checkpoint's folder has the first name
        return tensor.names[:1]
    return tuple(found.accepted) or tensor.names[:1]
