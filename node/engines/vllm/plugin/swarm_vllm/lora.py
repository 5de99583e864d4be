"""A worker process's adapters: prepared beside those that run, proven, and switched between two steps.

vLLM stacks the matrices of all adapters of a layer, one index an adapter, and a table says which adapter is at which
index. One index more than the swarm has slots is kept free. A new version is written there by vLLM's own functions for
that layer, while steps go on; it is read back; and then the table is changed. So a step sees either version, whole.

Every live element is checked: vLLM's function is run once more with empty matrices under a recorder (`trace`), which
tells where each element of each matrix goes, and everything else at that index must be zero.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name

from .adapter_messages import AdapterLayer
from .boxes import Box
from .pace import Pace
from .trace import INTEGERS, TensorMap, record

__all__ = ["LiveAdapters", "NotPrepared", "Refused"]


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""


class NotPrepared(Exception):
    """The adapter asked for is not the one that was prepared."""


class Refused(Exception):
    """vLLM cannot serve this adapter; the message is a sentence for the user."""


@dataclass(frozen=True)
class _Prepared:
    """One version of an adapter, written at `index` of every layer. `weights`: its slot's weights, sealed memory."""

    number: int
    name: str
    version: str
    index: int
    layers: tuple[AdapterLayer, ...]
    weights: NDArray[np.int16]
    rank: int


class LiveAdapters:
    """The adapters of one rank. `number`: an adapter's id in vLLM, its slot plus one.

    `prepare` and `differing` run in the driver's thread, the others between two steps.
    """

    def __init__(self, manager: Any) -> None:
        """`manager`: vLLM's `LoRAModelManager`."""
        self._manager = manager
        self._prepared: _Prepared | None = None
        self._live: dict[int, _Prepared] = {}

    # ------------------------------------------------------------ in the driver's thread

    @torch.no_grad()
    def prepare(
        self, number: int, name: str, version: str, layers: tuple[AdapterLayer, ...], weights: NDArray[np.uint8]
    ) -> None:
        """Write the adapter at a free index, which no step reads. Replaces what was prepared.

        Raises `Refused` for an adapter that vLLM cannot serve.
        """
        self._prepared = None
        free = [index for index, used in enumerate(self._manager.lora_index_to_id) if used is None]
        if not free:
            raise Refused("vLLM has no room for one more adapter: start it with a higher --max-loras.")
        rank, most = max(layer.rank for layer in layers), self._manager.lora_config.max_lora_rank
        if rank > most:
            enough = next((value for value in _RANKS if value >= rank), None)
            flag = "train it with a lower rank" if enough is None else f"start vLLM with --max-lora-rank {enough}"
            raise Refused(f"The adapter {name} has rank {rank}, and this vLLM takes at most {most}: {flag}.")
        made = _Prepared(number, name, version, free[-1], layers, weights.view(np.int16), rank)
        kind = self._manager.lora_config.lora_dtype
        adapters = self._loras(made, ((a.to(kind), b.to(kind)) for a, b in _matrices(made)))
        pace = Pace()
        for module_name, module in self._manager.modules.items():
            found = self._manager._get_lora_layer_weights(adapters, module_name)
            if found is None:
                module.reset_lora(made.index)
            else:
                module.set_lora(made.index, found.lora_a, found.lora_b)
            pace.rest()
        self._synchronize()
        self._prepared = made

    def _loras(self, made: _Prepared, matrices: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> LoRAModel:
        """The adapter as vLLM's loader would make it of a peft folder: packed, with the scaling in B."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        loras = {}
        for layer, (a, b) in zip(made.layers, matrices):  # noqa: B905 - Python 3.10
            name, _ = parse_fine_tuned_lora_name(f"base_model.model.{layer.module}.lora_A.weight", mapper)
            loras[name] = LoRALayerWeights(name, layer.rank, layer.rank, a, b, layer.scaling)
        adapters = LoRAModel(made.number, made.rank, loras)
        known = set(self._manager.modules) | {r for packed in self._manager.packed_modules.values() for r in packed}
        for layer, name in zip(made.layers, loras):  # noqa: B905
            if name not in known:
                raise Refused(
                    f"vLLM cannot adapt {layer.module} of this model, which the adapter {made.name} changes: train it "
                    "with other target_modules, start vLLM with --lora-target-modules that name it, or use --engine "
                    "transformers."
                )
        self._manager._create_merged_loras_inplace(adapters)
        return adapters

    @torch.no_grad()
    def differing(self, number: int, prepared: bool) -> tuple[list[str], dict[str, int]]:
        """(the modules whose live bits are not the adapter's, elements of each module that are live on this rank).

        `prepared`: of what was prepared, instead of what is served. Raises `NotPrepared` for an adapter that is not
        there.
        """
        made = self._prepared if prepared else self._live.get(number)
        if made is None or made.number != number:
            raise NotPrepared(f"no adapter {number}")
        places = self._places(made)
        wrong: set[str] = set()
        counts: dict[str, int] = {}
        pace = Pace()
        for module_name, module in self._manager.modules.items():
            for side, stacked in (("a", module.lora_a_stacked), ("b", module.lora_b_stacked)):
                for tensor in stacked:
                    live = tensor[made.index].reshape(-1)
                    wanted = torch.zeros_like(live)
                    first = int(tensor[made.index].storage_offset())
                    own = places.get(tensor.untyped_storage()._cdata, [])
                    for layer, given, box in own:
                        _strided(wanted, box, first).copy_(torch.as_strided(given, box.shape, box.strides, box.offset))
                        counts[layer + "." + side] = counts.get(layer + "." + side, 0) + box.elements
                    if not torch.equal(_integers(live), _integers(wanted)):
                        wrong |= {layer for layer, _, _ in own} or {module_name}
                    pace.rest()
        return sorted(wrong), counts

    def _places(self, made: _Prepared) -> dict[int, list[tuple[str, torch.Tensor, Box]]]:
        """By stacked storage: (module, what its elements must be, a box of them)."""
        kind = self._manager.lora_config.lora_dtype
        stacks = _Stacks(self._manager.modules)
        probes = [
            (torch.empty(own.rank, own.inputs, dtype=kind), torch.empty(own.outputs, own.rank, dtype=kind))
            for own in made.layers
        ]
        maps = {probe.untyped_storage()._cdata: TensorMap() for pair in probes for probe in pair}
        adapters = self._loras(made, iter(probes))
        with record(stacks, maps):
            for module_name, module in self._manager.modules.items():
                found = self._manager._get_lora_layer_weights(adapters, module_name)
                if found is not None:
                    module.set_lora(made.index, found.lora_a, found.lora_b)
        out: dict[int, list[tuple[str, torch.Tensor, Box]]] = {}
        for layer, pair, given in zip(made.layers, probes, _scaled(made, kind)):  # noqa: B905
            for probe, values in zip(pair, given):  # noqa: B905
                found = maps[probe.untyped_storage()._cdata]
                if found.opaque:
                    raise Refused(f"vLLM keeps the adapter of {layer.module} in another form ({found.opaque}).")
                for box in found.boxes:
                    out.setdefault(stacks.cdata[box.storage], []).append((layer.module, values.reshape(-1), box))
        return out

    # ------------------------------------------------------------ between two steps

    def switch(self, number: int, version: str) -> None:
        """Serve what was prepared. Raises `NotPrepared`, with nothing changed."""
        made = self._prepared
        if made is None or (made.number, made.version) != (number, version):
            raise NotPrepared(f"version {version} of adapter {number} is not what was prepared")
        self._prepared = None
        manager = self._manager
        manager.remove_adapter(number)  # frees its index in the table, and touches no weights
        manager._registered_adapters[number] = LoRAModel(number, made.rank, {})
        manager._active_adapters[number] = None
        manager.lora_index_to_id[made.index] = number
        self._live[number] = made

    def drop(self, number: int) -> None:
        """Forget an adapter (0: all). Does nothing for an unknown one."""
        for own in [number] if number else list(self._manager.list_adapters()):
            self._live.pop(own, None)
            self._manager.remove_adapter(own)

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class _Stacks:
    """The storages of all stacked matrices, for `record`."""

    def __init__(self, modules: dict[str, Any]) -> None:
        stacks = [t for module in modules.values() for t in (*module.lora_a_stacked, *module.lora_b_stacked)]
        self.cdata = [stacked.untyped_storage()._cdata for stacked in stacks]
        self._numbers = {cdata: number for number, cdata in enumerate(self.cdata)}

    def of(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata)


def _matrices(made: _Prepared) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each layer, bf16, copies of their own."""
    at = 0
    for layer in made.layers:
        pair = []
        for shape in ((layer.rank, layer.inputs), (layer.outputs, layer.rank)):
            count = math.prod(shape)
            if at + count > made.weights.size:
                raise Refused(f"The adapter {made.name} is larger than its slot.")
            pair.append(torch.from_numpy(made.weights[at : at + count].copy()).view(torch.bfloat16).reshape(shape))
            at += count
        yield pair[0], pair[1]


def _scaled(made: _Prepared, kind: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What A and B of each layer must be live."""
    for layer, (a, b) in zip(made.layers, _matrices(made)):  # noqa: B905
        b = b.to(kind)
        yield a.to(kind), b if layer.scaling == 1 else b * layer.scaling


def _strided(flat: torch.Tensor, box: Box, first: int) -> torch.Tensor:
    return torch.as_strided(flat, box.shape, box.live_strides, box.live_offset - first)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])
