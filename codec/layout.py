"""The layout of a model: its tensors, their blocks, and the small files that go with them, without the weights.

A layout lists the tensors under their names in a Hugging Face checkpoint, tied tensors once, and the hashes of config,
tokenizer and chat template. Its hash is the model's identity. It also fixes the offset of each tensor in a replica's
buffer and the division of tensors into blocks; computing both costs time per tensor, never per element.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Final

from blake3 import blake3

from codec.bits import DTYPES, DType
from codec.errors import PeerError
from codec.varint import MAX_INT, Reader, Writer

__all__ = ["BLOCK_ELEMENTS", "MAX_LAYOUT_BYTES", "BlockSpec", "FileSpec", "Layout", "TensorSpec"]

BLOCK_ELEMENTS: Final = 1 << 20
"""Elements per block, all of one tensor: the unit of coding, hashing and repair. Larger blocks would make versions
0.4 % smaller; smaller blocks would add headers (256 Ki: +1.8 %, 64 Ki: +10 %, at 1 % density)."""

MAX_LAYOUT_BYTES: Final = 32 << 20
"""Enough for a model of 400,000 tensors."""

_MAGIC: Final = b"SWL1"
_ALIGN: Final = 64
"""Bytes: tensors start on a cache line, so that aligned vector loads never straddle two lines."""
_MAX_TENSORS: Final = 1 << 20
_MAX_NAME: Final = 512
_MAX_ALIASES: Final = 16
_MAX_DIMENSIONS: Final = 16
_MAX_FILES: Final = 256
_MAX_FILE_BYTES: Final = 64 << 20
_MAX_MODEL_BYTES: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor. `dtype`: its safetensors name. `aliases`: other names of the same bits (tied), sorted."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def type(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.type.itemsize

    @property
    def n_blocks(self) -> int:
        return -(-self.elements // BLOCK_ELEMENTS)


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A small file that an engine needs beside the weights. `size`: bytes. `hash`: BLAKE3, 32 bytes."""

    name: str
    size: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block. `tensor`: its index in the layout. `start`, `count`: elements within the tensor. `offset`, `nbytes`:
    bytes in the replica's buffer."""

    tensor: int
    name: str
    dtype: DType
    start: int
    count: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Tensors and files, each sorted by name. The constructor raises `PeerError` naming a field that is not valid."""

    tensors: tuple[TensorSpec, ...]
    files: tuple[FileSpec, ...] = ()

    def __post_init__(self) -> None:
        _check_tensors(self.tensors)
        _check_files(self.files)

    @cached_property
    def _first_blocks(self) -> list[int]:
        """The first block of each tensor; the last entry is the number of all blocks."""
        return list(accumulate((tensor.n_blocks for tensor in self.tensors), initial=0))

    @cached_property
    def _offsets(self) -> list[int]:
        """The offset of each tensor in the replica's buffer; the last entry is the buffer's size."""
        return list(accumulate((-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in self.tensors), initial=0))

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {name: i for i, tensor in enumerate(self.tensors) for name in (tensor.name, *tensor.aliases)}

    @property
    def n_blocks(self) -> int:
        return self._first_blocks[-1]

    @cached_property
    def _base_tensors(self) -> int:
        return bisect_left([tensor.name for tensor in self.tensors], "~")

    @property
    def base_blocks(self) -> int:
        """The number of blocks of tensors whose names sort before `~`; those of other parts follow (`codec.parts`)."""
        return self._first_blocks[self._base_tensors]

    @property
    def base_nbytes(self) -> int:
        """Bytes of a replica's buffer that the base takes."""
        return self._offsets[self._base_tensors]

    @cached_property
    def base_bytes(self) -> int:
        """Bytes of the base's tensors without padding: the size of a full copy of the base."""
        return sum(tensor.nbytes for tensor in self.tensors[: self._base_tensors])

    @property
    def nbytes(self) -> int:
        """Bytes of a replica's buffer: all tensors, each padded to a cache line."""
        return self._offsets[-1]

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of all tensors without padding: the size of a full copy of the model."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def tensor(self, name: str) -> TensorSpec:
        """The stored tensor with this name or alias. Raises `KeyError`."""
        return self.tensors[self._by_name[name]]

    def offset(self, name: str) -> int:
        """The offset of the tensor in the replica's buffer, in bytes. Raises `KeyError`."""
        return self._offsets[self._by_name[name]]

    def blocks_of(self, name: str) -> range:
        """The ids of the tensor's blocks. Raises `KeyError`."""
        index = self._by_name[name]
        return range(self._first_blocks[index], self._first_blocks[index + 1])

    def block(self, block: int) -> BlockSpec:
        """The block with this id. Raises `IndexError`."""
        if not 0 <= block < self.n_blocks:
            raise IndexError(f"block {block} of {self.n_blocks}")
        index = bisect_right(self._first_blocks, block) - 1
        tensor = self.tensors[index]
        start = (block - self._first_blocks[index]) * BLOCK_ELEMENTS
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        size = tensor.type.itemsize
        return BlockSpec(
            index, tensor.name, tensor.type, start, count, self._offsets[index] + start * size, count * size
        )

    def to_bytes(self) -> bytes:
        """The only encoding of this layout; `docs/codec.md` describes it."""
        out = Writer(_MAGIC)
        out.uint(len(self.tensors))
        for tensor in self.tensors:
            out.text(tensor.name)
            out.text(tensor.dtype)
            out.uint(len(tensor.shape))
            for size in tensor.shape:
                out.uint(size)
            out.uint(len(tensor.aliases))
            for alias in tensor.aliases:
                out.text(alias)
        out.uint(len(self.files))
        for file in self.files:
            out.text(file.name)
            out.uint(file.size)
            out.raw(file.hash)
        return bytes(out.data)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Layout":
        """Decode and validate an encoded layout. Raises `PeerError` naming the field."""
        if len(data) > MAX_LAYOUT_BYTES:
            raise PeerError(f"layout: {len(data)} bytes, at most {MAX_LAYOUT_BYTES}")
        reader = Reader(data, "layout")
        if reader.raw("magic", len(_MAGIC)) != _MAGIC:
            raise PeerError("layout.magic: not a layout of this version")
        tensors = tuple(_read_tensor(reader) for _ in range(reader.uint("tensors", _MAX_TENSORS)))
        files = tuple(
            FileSpec(reader.text("file", _MAX_NAME), reader.uint("file size"), reader.raw("file hash", 32))
            for _ in range(reader.uint("files", _MAX_FILES))
        )
        reader.end()
        return cls(tensors, files)

    @cached_property
    def hash(self) -> bytes:
        """The model's identity: the BLAKE3 hash (32 bytes) of `to_bytes()`."""
        return blake3(self.to_bytes()).digest()

    def same_tensors(self, other: "Layout") -> bool:
        """Whether both have the same tensors (name, dtype, shape); small files and aliases may differ."""
        return [(t.name, t.dtype, t.shape) for t in self.tensors] == [(t.name, t.dtype, t.shape) for t in other.tensors]


def _read_tensor(reader: Reader) -> TensorSpec:
    return TensorSpec(
        reader.text("tensor name", _MAX_NAME),
        reader.text("dtype", 16),
        tuple(reader.uint("shape") for _ in range(reader.uint("dimensions", _MAX_DIMENSIONS))),
        tuple(reader.text("alias", _MAX_NAME) for _ in range(reader.uint("aliases", _MAX_ALIASES))),
    )


def _check_tensors(tensors: tuple[TensorSpec, ...]) -> None:
    names = [tensor.name for tensor in tensors]
    if len(names) > _MAX_TENSORS:
        raise PeerError(f"layout.tensors: {len(names)}, at most {_MAX_TENSORS}")
    if any(a >= b for a, b in pairwise(names)):
        raise PeerError("layout.tensors: not in ascending order of their names")
    seen = set(names)
    total = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise PeerError(f"layout.dtype: {tensor.name} is {tensor.dtype!r}, which this version does not know")
        if len(tensor.shape) > _MAX_DIMENSIONS or any(not 0 <= size <= MAX_INT for size in tensor.shape):
            raise PeerError(f"layout.shape: {tensor.name} has an impossible shape")
        total += tensor.nbytes + _ALIGN
        if total > _MAX_MODEL_BYTES:
            raise PeerError(f"layout.shape: more than {_MAX_MODEL_BYTES} bytes of tensors")
        if len(tensor.aliases) > _MAX_ALIASES or list(tensor.aliases) != sorted(tensor.aliases):
            raise PeerError(f"layout.aliases: of {tensor.name}: too many, or not sorted")
        for name in tensor.aliases:
            if name in seen:
                raise PeerError(f"layout.aliases: {name!r} occurs twice")
            seen.add(name)
    for name in seen:
        if not 0 < len(name.encode(errors="surrogatepass")) <= _MAX_NAME or not name.isprintable():
            raise PeerError(f"layout.tensor name: {name[:40]!r} is empty, too long or not printable")


def _check_files(files: tuple[FileSpec, ...]) -> None:
    names = [file.name for file in files]
    if len(names) > _MAX_FILES or any(a >= b for a, b in pairwise(names)):
        raise PeerError("layout.files: too many, or not in ascending order of their names")
    for file in files:
        name = file.name
        # A name becomes a path on the receiver's disk: it must be one visible path component.
        if (
            not 0 < len(name.encode(errors="surrogatepass")) <= _MAX_NAME
            or not name.isprintable()
            or name[0] == "."
            or "/" in name
            or "\\" in name
        ):
            raise PeerError(f"layout.file: {name[:40]!r} is not a plain file name")
        if not 0 <= file.size <= _MAX_FILE_BYTES or len(file.hash) != 32:
            raise PeerError(f"layout.file: {name!r} is larger than {_MAX_FILE_BYTES} bytes, or its hash is not 32")
