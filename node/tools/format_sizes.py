"""What a step costs in the formats of receivers: two checkpoints quantised, and their differences really coded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits, DType
from codec.checkpoint import Checkpoint
from codec.chunk import CODER_RICE
from codec.errors import UsageError
from codec.formats.coding import encode_format_block
from codec.formats.quantise import Band, quantise, requantise
from codec.formats.spec import Format, FormatTensor, format_ratio, is_quantised
from codec.layout import BLOCK_ELEMENTS
from node.tools.table import bytes_text, table

__all__ = ["FormatSizes", "bands_of", "coded_bytes", "count_tensor", "render", "sizes_of_step", "updated_bands"]


@dataclass
class FormatSizes:
    """Sums over the tensors of a step. Bytes are payloads, without headers.

    `format_bytes`: of the format's part. `kept_bytes`: of the tensors that stay bf16, which its holders receive too.
    `bf16_bytes`: of the whole delta in bf16. `held`: what a holder keeps, as a share of the bf16 model.
    """

    form: Format
    format_bytes: int = 0
    kept_bytes: int = 0
    bf16_bytes: int = 0
    codes: int = 0
    changed_codes: int = 0
    """Stored elements of the codes that differ; of int4, bytes with two codes."""
    scales: int = 0
    changed_scales: int = 0
    held: float = 1.0

    @property
    def of_bf16(self) -> float:
        """What a holder receives, as a share of the bf16 delta."""
        return (self.format_bytes + self.kept_bytes) / max(1, self.bf16_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The fields, for `--json`."""
        fields = {field.name: getattr(self, field.name) for field in dataclass_fields(self)}
        return fields | {"form": self.form.name, "of_bf16": self.of_bf16}


def coded_bytes(old: Bits, new: Bits, dtype: DType, coder: int = CODER_RICE) -> int:
    """The payload of a tensor's change, coded block by block."""
    total = 0
    for start in range(0, old.size, BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        encoded = encode_format_block(0, old[block], new[block], dtype, coder)
        total += 0 if encoded is None else len(encoded.delta.payload)
    return total


def bands_of(tensor: FormatTensor, bits: Bits) -> list[Band]:
    """Each plane of a tensor, quantised in full. `bits`: uint16, flat."""
    return [quantise(plane, tensor.matrix, tensor.form) for plane in _planes(tensor, bits)]


def updated_bands(tensor: FormatTensor, old: Bits, new: Bits, bands: Sequence[Band]) -> list[Band]:
    """The planes of `new`, from those of `old` (`bands`) and the elements that differ."""
    found: list[Band] = []
    for before, after, band in zip(_planes(tensor, old), _planes(tensor, new), bands, strict=True):
        positions = np.flatnonzero(before != after).astype(np.uint32)
        found.append(requantise(before, after, positions, band, tensor.matrix, tensor.form))
    return found


def count_tensor(
    sizes: FormatSizes, tensor: FormatTensor, before: Sequence[Band], after: Sequence[Band], coder: int = CODER_RICE
) -> None:
    """Add the change of one tensor's codes and scales to `sizes`."""
    for name, spec in (("codes", tensor.codes), ("scales", tensor.scales)):
        old, new = (np.concatenate([getattr(band, name) for band in bands]) for bands in (before, after))
        changed = int(np.count_nonzero(old != new))
        sizes.format_bytes += coded_bytes(old.view(spec.type.bits), new.view(spec.type.bits), spec.type, coder)
        setattr(sizes, name, getattr(sizes, name) + old.size)
        setattr(sizes, f"changed_{name}", getattr(sizes, f"changed_{name}") + changed)


def sizes_of_step(old: Path, new: Path, forms: Sequence[Format]) -> list[FormatSizes]:
    """Quantise and code the step between two checkpoints in each of `forms`, a tensor at a time.

    Raises `UsageError` for checkpoints of two models, and for a model that has nothing to quantise.
    """
    before, after = Checkpoint.open(old), Checkpoint.open(new)
    layout = before.layout
    if not layout.same_tensors(after.layout):
        raise UsageError(f"{old} and {new} are not two versions of one model.")
    rows = [FormatSizes(form, held=format_ratio(layout, form)) for form in forms]
    for spec in layout.tensors:
        one, other = before.bits(spec.name), after.bits(spec.name)
        nbytes = coded_bytes(one, other, spec.type)
        for sizes in rows:
            sizes.bf16_bytes += nbytes
            if not is_quantised(spec, sizes.form):
                sizes.kept_bytes += nbytes
                continue
            tensor = FormatTensor(sizes.form, spec)
            bands = bands_of(tensor, one)
            count_tensor(sizes, tensor, bands, updated_bands(tensor, one, other, bands))
    return rows


def render(rows: Sequence[FormatSizes]) -> str:
    """A table for people."""

    def lines() -> Iterator[tuple[str, str]]:
        yield "in formats", "what a node receives (join --format), and holds"
        for sizes in rows:
            received = bytes_text(sizes.format_bytes + sizes.kept_bytes)
            yield (
                f"  {sizes.form.name}",
                f"{received}, {sizes.of_bf16:.3f} x the bf16 delta; codes alone {bytes_text(sizes.format_bytes)}; "
                f"holds {sizes.held:.2f} x the model",
            )

    return table(lines())


def _planes(tensor: FormatTensor, bits: Bits) -> NDArray[np.uint16]:
    return np.ascontiguousarray(bits).view(np.uint16).reshape(tensor.matrix.planes, -1)
