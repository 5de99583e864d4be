"""The formats by name, the tensors that they quantise, and the tensors of a format's part. Relays import it: no numpy.

An int4 format holds *token tables* (embeddings and output heads, one row a token) as int8 with a scale for each row.

A *tile* is the set of a matrix's elements that share one scale: 128 rows by 128 columns, one row (a *channel*), or 128
columns of one row (a *group*). `docs/formats.md` specifies every bit.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

from codec.bits import DTYPES
from codec.errors import UsageError
from codec.layout import Layout, TensorSpec

__all__ = [
    "FORMATS",
    "MAX_FORMATS",
    "Format",
    "FormatTensor",
    "Matrix",
    "format_named",
    "format_ratio",
    "format_tensors",
    "is_quantised",
    "is_token_table",
    "quantised",
    "unquantised",
]

MAX_FORMATS: Final = 3
"""Formats of one swarm. The seed computes each of them for every version, and holds them beside the model."""

_SIDE: Final = 128
"""Elements on each side of a block, and in a group."""
_CODES: Final = {"fp8": "F8_E4M3", "int8": "I8", "int4": "U8"}
"""The dtype in which the codes of each kind of element are stored; `U8` holds two codes."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format. `element`: fp8 (e4m3), int8 or int4. `tile_rows`, `tile_columns`: the tile; 0 columns: a whole row.
    `powers`: whether scales are powers of two (e8)."""

    name: str
    element: str
    tile_rows: int
    tile_columns: int
    powers: bool

    @property
    def codes_dtype(self) -> str:
        """The safetensors dtype of the codes."""
        return _CODES[self.element]

    @property
    def scales_dtype(self) -> str:
        """The safetensors dtype of the scales: F8_E8M0 holds the exponent of a power of two plus 127."""
        return "F8_E8M0" if self.powers else "F32"

    @property
    def codes_per_byte(self) -> int:
        return 2 if self.element == "int4" else 1


def _formats() -> Iterator[Format]:
    for element, tile, rows, columns in (
        ("fp8", "block", _SIDE, _SIDE),
        ("fp8", "channel", 1, 0),
        ("int8", "channel", 1, 0),
        ("int4", "group", 1, _SIDE),
    ):
        yield Format(f"{element}-{tile}", element, rows, columns, False)
        yield Format(f"{element}-{tile}-e8", element, rows, columns, True)


FORMATS: Final[Mapping[str, Format]] = MappingProxyType({form.name: form for form in _formats()})
"""Every format, by its name."""


def format_named(name: str) -> Format:
    """The format with this name. Raises `UsageError` naming those that exist."""
    if name not in FORMATS:
        raise UsageError(f"There is no format {name[:40]!r}: take one of {', '.join(FORMATS)}.")
    return FORMATS[name]


class Matrix(NamedTuple):
    """The geometry of a quantised tensor: `planes` matrices of `rows` x `columns`, one after the other. A tensor of two
    dimensions is one plane; of three (the experts of a mixture), one plane an expert."""

    planes: int
    rows: int
    columns: int

    @classmethod
    def of(cls, tensor: TensorSpec) -> "Matrix":
        planes = tensor.shape[0] if len(tensor.shape) == 3 else 1
        return cls(planes, tensor.shape[-2], tensor.shape[-1])

    def tile_columns(self, form: Format) -> int:
        """The columns of a tile, at most those of the matrix."""
        return form.tile_columns or self.columns

    def grid(self, form: Format) -> tuple[int, int]:
        """The tiles down and across one plane; those at the edges may be smaller."""
        return -(-self.rows // form.tile_rows), -(-self.columns // self.tile_columns(form))

    def row_bytes(self, form: Format) -> int:
        """The bytes of one row's codes. A row of int4 codes with an odd number of columns ends in half a byte, zero."""
        return -(-self.columns // form.codes_per_byte)


@dataclass(frozen=True)
class FormatTensor:
    """One quantised tensor and the two tensors that hold it in a format. `part`: the format to whose part they belong.
    `base`: the tensor, of which `is_quantised` holds."""

    part: Format
    base: TensorSpec

    @cached_property
    def form(self) -> Format:
        """How this tensor is quantised: as `part` says, but a token table of an int4 format as int8 per channel."""
        return _table_form(self.part) if is_token_table(self.base) else self.part

    @cached_property
    def matrix(self) -> Matrix:
        return Matrix.of(self.base)

    @cached_property
    def codes(self) -> TensorSpec:
        """Shape: that of the base, whose last dimension is halved (and rounded up) for int4."""
        shape = (*self.base.shape[:-1], self.matrix.row_bytes(self.form))
        return TensorSpec(f"~format/{self.part.name}/{self.base.name}/codes", self.form.codes_dtype, shape)

    @cached_property
    def scales(self) -> TensorSpec:
        """Shape: (tiles down, tiles across) of the base, with the base's planes before them if it has three
        dimensions."""
        shape = (*self.base.shape[:-2], *self.matrix.grid(self.form))
        return TensorSpec(f"~format/{self.part.name}/{self.base.name}/scales", self.form.scales_dtype, shape)


_TOKEN_TABLES: Final = frozenset(
    [
        *("embed_tokens", "embed_tokens_per_layer", "embed_in", "word_embeddings", "tok_embeddings", "wte"),
        *("lm_head", "embed_out", "output"),
    ]
)
"""Last names of modules whose matrices have one row a token: embeddings, and output heads."""

_KEPT: Final = frozenset(
    [
        *("wpe", "score", "classifier", "v_head", "q_head"),
        *("router", "gate", "shared_expert_gate", "e_score_correction_bias"),
        *("conv1d", "dt_proj", "x_proj"),
    ]
)
"""Last names of modules whose matrices stay in bf16: positions, value heads, routers of mixtures (a small error of a
router sends a token to another expert), and the small matrices of state-space layers."""


def is_token_table(tensor: TensorSpec) -> bool:
    """Whether a tensor of the base is an embedding or an output head in bf16, or both as one tied tensor."""
    if tensor.dtype != "BF16" or not tensor.elements or len(tensor.shape) != 2:
        return False
    return all(
        name.endswith(".weight")
        and not name.startswith("~")
        and name.removesuffix(".weight").rpartition(".")[2] in _TOKEN_TABLES
        for name in (tensor.name, *tensor.aliases)
    )


def is_quantised(tensor: TensorSpec, form: Format) -> bool:
    """Whether `form` quantises this tensor of the base: bf16 weights of linear layers, those of experts included, and
    in an int4 format token tables.

    Decided by name and shape alone, so that every implementation decides alike: `docs/formats.md` has the rule.
    """
    if is_token_table(tensor):
        return form.element == "int4"
    if tensor.dtype != "BF16" or not tensor.elements or tensor.name.startswith("~") or tensor.aliases:
        return False
    experts = ".experts." in tensor.name
    if len(tensor.shape) != 2 and not (experts and len(tensor.shape) == 3):
        return False
    name = tensor.name.removesuffix(".weight")
    if name == tensor.name and not (experts and len(tensor.shape) == 3):
        return False
    last = name.rpartition(".")[2]
    if last in _KEPT or last in _TOKEN_TABLES or last.endswith("bias"):
        return False
    return not re.search(r"embed|norm", name)


def _table_form(part: Format) -> Format:
    """How a format that quantises token tables holds them."""
    return FORMATS["int8-channel-e8" if part.powers else "int8-channel"]


def quantised(base: Layout, form: Format) -> tuple[FormatTensor, ...]:
    """The tensors of `base` that the format quantises, in the order of the layout. Raises `UsageError` if there are
    none."""
    found = tuple(FormatTensor(form, tensor) for tensor in base.tensors if is_quantised(tensor, form))
    if not found:
        raise UsageError(
            f"The model has no bf16 weights of linear layers, so {form.name} has nothing to quantise: leave out "
            "--format."
        )
    return found


def unquantised(base: Layout, form: Format) -> tuple[TensorSpec, ...]:
    """The tensors of `base` that the format leaves as they are; a member that holds the format holds them too."""
    return tuple(tensor for tensor in base.tensors if not is_quantised(tensor, form))


def format_tensors(base: Layout, form: Format) -> tuple[TensorSpec, ...]:
    """The tensors of the format's part, in the order of their names. Raises `UsageError` as `quantised`."""
    both = (spec for tensor in quantised(base, form) for spec in (tensor.codes, tensor.scales))
    return tuple(sorted(both, key=lambda spec: spec.name))


def format_ratio(base: Layout, form: Format) -> float:
    """The bytes that a member with this format holds (its part and what stays bf16), as a share of the base's bytes."""
    held = sum(spec.nbytes for spec in (*format_tensors(base, form), *unquantised(base, form)))
    return held / max(1, base.full_bytes)


assert all(form.codes_dtype in DTYPES and form.scales_dtype in DTYPES for form in FORMATS.values())
