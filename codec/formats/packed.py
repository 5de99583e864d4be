"""A format's codes in the layout of a compressed-tensors checkpoint, for engines whose kernels compute with int4 codes.

Each linear layer NAME.weight is two tensors: `NAME.weight_packed` I32 (rows, columns / 8), the very bytes of the codes;
and `NAME.weight_scale` BF16 (rows, columns / 128), which holds a power of two exactly. `NAME.weight_shape` is left out:
layers that an engine fuses have one place for several of them, and no kernel reads it. All other tensors are those of
the dequantised base. `docs/formats.md`, section 9.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec.bits import Bits
from codec.errors import UsageError
from codec.formats.dequantised import DequantisedBase, Touched
from codec.formats.part import Read
from codec.formats.spec import Format, FormatTensor, is_token_table, quantised
from codec.layout import BLOCK_ELEMENTS, FileSpec, Layout, TensorSpec
from codec.staging import StagedBlock

__all__ = ["PackedBase"]

_CODES_A_WORD: Final = 8
_GROUP: Final = 128
_ROWS: Final = 32
"""Kernels for packed codes take multiples of so many rows, and whole groups."""
_CONFIG: Final = "config.json"


class PackedBase:
    """The base of a model in `int4-group-e8`, as an engine with packed codes loads it.

    `layout`: of that checkpoint; its small files are the base's, with another config. `files`: that config, by name.
    Raises `UsageError` for another format, a config that cannot be read, and matrices that no kernel takes packed.
    """

    def __init__(self, layout: Layout, form: Format, config: bytes) -> None:
        """`layout`: the whole model's. `config`: the bytes of the base's config.json."""
        if form.name != "int4-group-e8":
            raise UsageError(
                f"--engine-holds format: no kernel here computes with the codes of {form.name}. Use --format "
                "int4-group-e8, or leave out --engine-holds."
            )
        self._base, self._whole = DequantisedBase(layout, form), layout
        self._packed: dict[str, FormatTensor] = {}
        """By name of a packed tensor or a scale."""
        by_base = {tensor.base.name: tensor for tensor in quantised(self._base.layout, form)}
        specs: list[TensorSpec] = []
        for spec in self._base.layout.tensors:
            if spec.name not in by_base or is_token_table(spec):
                specs.append(spec)
                continue
            made = _packed_specs(by_base[spec.name])
            self._packed |= dict.fromkeys((one.name for one in made), by_base[spec.name])
            specs += made
        self._by_codes = {tensor.codes.name: tensor for tensor in self._packed.values()}
        self._by_scales = {tensor.scales.name: tensor for tensor in self._packed.values()}
        kept = [spec.name.removesuffix(".weight") for spec in specs if spec.name.endswith(".weight")]
        self.files: Mapping[str, bytes] = {_CONFIG: _packed_config(config, kept)}
        others = [file for file in self._base.layout.files if file.name not in self.files]
        mine = [FileSpec(name, len(data), blake3(data).digest()) for name, data in self.files.items()]
        self.layout = Layout(
            tuple(sorted(specs, key=lambda spec: spec.name)),
            tuple(sorted([*others, *mine], key=lambda file: file.name)),
        )

    def block(self, block: int, read: Read) -> Bits:
        """The bits of one block of `layout`. `read`: of the format's part, and of the tensors that stay bf16."""
        spec = self.layout.block(block)
        tensor = self._packed.get(spec.name)
        if tensor is None:
            return self._base.block(self._base.layout.blocks_of(spec.name)[spec.start // BLOCK_ELEMENTS], read)
        if spec.name.endswith("_packed"):
            return read(tensor.codes.name, 4 * spec.start, 4 * spec.count).copy().view(np.uint32)
        return read(tensor.scales.name, spec.start, spec.count).astype(np.uint16) << np.uint16(7)

    def touched(self, changes: Iterable[StagedBlock], read: Read) -> Iterator[Touched]:
        """As `DequantisedBase.touched`, in blocks of `layout`: words with a code that changed, and scales."""
        others: list[StagedBlock] = []
        places: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        for change in changes:
            spec = self._whole.block(change.block)
            at = change.positions.astype(np.int64) + spec.start
            if spec.name in self._by_codes:
                places[self._by_codes[spec.name].base.name + "_packed"].append(at // 4)
            elif spec.name in self._by_scales:
                places[self._by_scales[spec.name].base.name + "_scale"].append(at)
            else:
                others.append(change)
        for name in sorted(places):
            words = np.unique(np.concatenate(places[name]))
            for index, block in enumerate(self.layout.blocks_of(name)):
                start = index * BLOCK_ELEMENTS
                here = words[slice(*np.searchsorted(words, (start, start + BLOCK_ELEMENTS)))]
                if here.size:
                    yield Touched(block, (here - start).astype(np.uint32), self.block(block, read))
        for found in self._base.touched(others, read):
            spec = self._base.layout.block(found.block)
            block = self.layout.blocks_of(spec.name)[spec.start // BLOCK_ELEMENTS]
            yield found._replace(block=block)


def _packed_specs(tensor: FormatTensor) -> tuple[TensorSpec, ...]:
    """The two tensors of a linear layer. Raises `UsageError` for one that no kernel takes packed."""
    spec, name = tensor.base, tensor.base.name
    if len(spec.shape) != 2 or ".experts." in name or spec.shape[0] % _ROWS or spec.shape[1] % _GROUP:
        raise UsageError(
            f"--engine-holds format: no kernel takes {name} packed (kernels take multiples of {_ROWS} rows and "
            f"{_GROUP} columns, and no experts). Leave out --engine-holds."
        )
    rows, columns = spec.shape
    return (
        TensorSpec(name + "_packed", "I32", (rows, columns // _CODES_A_WORD)),
        TensorSpec(name + "_scale", "BF16", (rows, columns // _GROUP)),
    )


def _packed_config(config: bytes, kept: list[str]) -> bytes:
    """The base's config with the section by which an engine finds packed codes. `kept`: modules in bf16."""
    try:
        settings: Any = msgspec.json.decode(config)
    except msgspec.DecodeError as error:
        raise UsageError(f"--engine-holds format: the model's config.json cannot be read ({error}).") from error
    if not isinstance(settings, dict) or "quantization_config" in settings:
        raise UsageError("--engine-holds format: the model's config.json names a quantisation of its own.")
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP, "dynamic": False,
    }  # fmt: skip
    section = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": sorted({*kept, "lm_head"}),
    }  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(settings | {"quantization_config": section}), indent=1)
