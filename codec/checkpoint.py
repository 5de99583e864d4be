"""Hugging Face checkpoint folders: safetensors files of any sharding, and the small files beside them.

Only the standard library and numpy read them: the header of a safetensors file is JSON, and the data is mapped. So no
torch is needed, and opening a 16 GB model allocates no memory for it.
"""

import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from blake3 import blake3

from codec.bits import DTYPES, Bits
from codec.errors import PeerError, UsageError
from codec.layout import FileSpec, Layout, TensorSpec

__all__ = ["Checkpoint", "PlannedFile", "WriteFile", "check_files", "is_model_file", "plan_files", "write_checkpoint"]

_MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors library has the same limit."""
Parts = Callable[[str], Bits | Iterator[Bits | int]]
"""Maps a tensor's name to its elements, flat, or to consecutive parts of them; an int is a part of so many zeros."""
WriteFile = Callable[[Path, Iterable[bytes | memoryview | int]], None]
"""Creates a file with these parts and makes it durable; it must not exist yet. An int is a part of so many zero bytes,
for which a hole suffices."""
_PAGE_BYTES: Final = 4096
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
PARTS_FILE: Final = "model.parts"
"""The file of a checkpoint that has the tensors beyond the base (`codec.parts`): safetensors under a name that no
library takes for weights. Its blocks of zeros are holes."""
_SHARD_BYTES: Final = 5 * 10**9
"""Bytes of tensors per shard, unless a single tensor is larger."""

_MODEL_FILE: Final = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|added_tokens|special_tokens_map|vocab)\.json"
    r"|tokenizer[^/]*|merges\.txt|vocab\.txt|spiece\.model|sentencepiece[^/]*\.model|[^/]*\.tiktoken|chat_template[^/]*"
)
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEAD: Final = "lm_head.weight"


def is_model_file(name: str) -> bool:
    """Whether this is the name of a small file (config, tokenizer, chat template) that an engine needs."""
    return _MODEL_FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor in a mapped safetensors file. `offset`: bytes from the start of `data`."""

    spec: TensorSpec
    data: mmap.mmap | bytes
    offset: int
    file: Path

    def bits(self) -> Bits:
        dtype = self.spec.type.bits
        count = self.spec.elements
        if self.offset % dtype.itemsize:  # a header may have any length: copy, to align the elements
            raw = self.data[self.offset : self.offset + count * dtype.itemsize]
            return np.frombuffer(raw, dtype)
        return np.frombuffer(self.data, dtype, count, self.offset)


class Checkpoint:
    """The weights and small files of one folder, or the weights of one file. Use `Checkpoint.open`."""

    def __init__(self, path: Path, stored: Mapping[str, _Stored]) -> None:
        self.path = path
        self._stored = dict(stored)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, parts: bool = False) -> "Checkpoint":
        """Map the checkpoint at `path`: a folder, or a .safetensors file. `parts`: with the tensors beyond the base, if
        the folder has any (`PARTS_FILE`).

        Raises `UsageError` if it does not exist or is damaged.
        """
        path = Path(path)
        try:
            files = _weight_files(path)
            if parts and (path / PARTS_FILE).is_file():
                files.append(path / PARTS_FILE)
            stored: dict[str, _Stored] = {}
            for file in files:
                for tensor in _read_header(file):
                    if tensor.spec.name in stored:
                        raise UsageError(
                            f"{path}: two files hold {tensor.spec.name!r}. Remove the one that you do not want."
                        )
                    stored[tensor.spec.name] = tensor
            checkpoint = cls(path, stored)
            _ = checkpoint.layout  # checks the tensor table while the path is known
        except PeerError as error:
            raise UsageError(f"{path} is damaged, or is not a checkpoint: {error}.") from error
        except OSError as error:
            raise UsageError(f"Cannot read {error.filename or path}: {error.strerror}.") from error
        return checkpoint

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored tensors in the layout's order; a tied tensor appears once."""
        return tuple(tensor.name for tensor in self.layout.tensors)

    @cached_property
    def layout(self) -> Layout:
        """The tensor table with tied tensors merged, and the hashes of the small files."""
        tied = self._tie()
        specs = []
        for name in sorted(self._stored):
            spec = self._stored[name].spec
            if tied is not None and name == tied[1]:
                continue
            aliases = (tied[1],) if tied is not None and name == tied[0] else ()
            specs.append(TensorSpec(name, spec.dtype, spec.shape, aliases))
        files = []
        for name, data in self._read_files():
            files.append(FileSpec(name, len(data), blake3(data).digest()))
        return Layout(tuple(specs), tuple(files))

    @property
    def files(self) -> dict[str, bytes]:
        """The contents of the small files by name."""
        return dict(self._read_files())

    def bits(self, name: str) -> Bits:
        """The tensor as a flat read-only array of unsigned integers, mapped and not copied. Raises `KeyError`."""
        return self._stored[self.layout.tensor(name).name].bits()

    def has(self, name: str) -> bool:
        """Whether a tensor is stored under this name."""
        return name in self._stored

    def place(self, name: str) -> tuple[TensorSpec, Path, int]:
        """(spec, file, offset of the first byte in the file) of a tensor. Raises `KeyError`."""
        stored = self._stored[name]
        return stored.spec, stored.file, stored.offset

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the tensors."""
        return tuple(dict.fromkeys(stored.file for stored in self._stored.values()))

    def _read_files(self) -> Iterable[tuple[str, bytes]]:
        if not self.path.is_dir():
            return
        for file in sorted(self.path.iterdir(), key=lambda file: file.name):
            if is_model_file(file.name) and file.is_file():
                yield file.name, file.read_bytes()

    def _config(self) -> dict[str, Any]:
        try:
            config = json.loads((self.path / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}

    def _tie(self) -> tuple[str, str] | None:
        """(embedding, head) if the config ties them and the head is absent or holds the same bits; else None."""
        config = self._config()
        text = config.get("text_config")
        flags = [part.get("tie_word_embeddings") for part in (config, text) if isinstance(part, dict)]
        if True not in flags:
            return None
        embeddings = [name for name in self._stored if name.endswith(_EMBEDDINGS)]
        if len(embeddings) != 1:
            return None
        heads = [name for name in self._stored if name == _HEAD or name.endswith("." + _HEAD)]
        if not heads:
            return embeddings[0], _HEAD
        embedding, head = self._stored[embeddings[0]], self._stored[heads[0]]
        same_type = (embedding.spec.dtype, embedding.spec.shape) == (head.spec.dtype, head.spec.shape)
        if len(heads) == 1 and same_type and np.array_equal(embedding.bits(), head.bits()):
            return embeddings[0], heads[0]
        return None


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"{path} does not exist. Give a checkpoint folder or a .safetensors file.")
    index = path / _INDEX
    single = path / _SINGLE
    if index.is_file():
        names = _indexed(index)
        if single.is_file() and _SINGLE not in names:  # transformers loads one of the two, vLLM the other
            raise UsageError(
                f"{path} has a {_SINGLE} and an {_INDEX} that names other files: they are two checkpoints. Remove the "
                "one that you do not want."
            )
        return [path / name for name in names]
    if single.is_file():
        return [single]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UsageError(
            f"{path} has no .safetensors files. Save the model with save_pretrained(safe_serialization=True)."
        )
    return found


def _indexed(index: Path) -> list[str]:
    """The files that an index names. Raises `PeerError` unless all lie in the folder of the index."""
    table = _parse(index.read_bytes(), index.name)
    weights = table.get("weight_map")
    if not isinstance(weights, dict):
        raise PeerError(f"{index.name}.weight_map: missing")
    names = set(weights.values()) if all(isinstance(name, str) for name in weights.values()) else {""}
    for name in names:
        if not name or "/" in name or "\\" in name or name.startswith("."):
            raise PeerError(f"{index.name}.weight_map: {name[:40]!r} is not the name of a file in its folder")
    return sorted(names)


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"{what}: not JSON") from error
    if not isinstance(table, dict):
        raise PeerError(f"{what}: not a JSON object")
    return table


def _read_header(file: Path) -> Iterable[_Stored]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise PeerError(f"{file.name}: it has no safetensors header, or is cut off")
        table = _parse(stream.read(length), f"{file.name}: header")
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    table.pop("__metadata__", None)
    start = 8 + length
    for name, entry in table.items():
        yield _check_entry(file, name, entry, data, start, size - start)


def _check_entry(path: Path, name: str, entry: Any, data: mmap.mmap, start: int, room: int) -> _Stored:
    """Validate one entry of a header. `start`: offset of the data in the file; `room`: bytes of data in the file."""
    file = path.name

    def counts(value: Any, most: int) -> tuple[int, ...] | None:
        """`value` as a tuple if it is a list of at most `most` integers from 0 to 2^50; else None."""
        if not isinstance(value, list) or len(value) > most:
            return None
        if any(type(number) is not int or not 0 <= number <= 1 << 50 for number in value):
            return None
        return tuple(value)

    if not isinstance(entry, dict):
        raise PeerError(f"{file}: {name[:80]!r}: not a JSON object")
    dtype = entry.get("dtype")
    shape, span = counts(entry.get("shape"), 16), counts(entry.get("data_offsets"), 2)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise PeerError(f"{file}: {name[:80]!r}.dtype: {str(dtype)[:20]} is not known to this version")
    if shape is None or span is None or len(span) != 2:
        raise PeerError(f"{file}: {name[:80]!r}: shape or data_offsets is not a short list of numbers")
    begin, end = span
    if not begin <= end <= room or end - begin != prod(shape) * DTYPES[dtype].itemsize:
        raise PeerError(f"{file}: {name[:80]!r}.data_offsets: outside the file, or not the size of the shape")
    return _Stored(TensorSpec(name, dtype, shape), data, start + begin, path)


def write_checkpoint(
    folder: str | os.PathLike[str],
    layout: Layout,
    bits: Parts,
    files: Mapping[str, bytes],
    shard_bytes: int = _SHARD_BYTES,
    write_file: WriteFile | None = None,
) -> None:
    """Write a folder that Hugging Face libraries load: shards, index and small files. It is complete or absent.

    `bits(name)`: the tensor, flat, or its consecutive parts. `files`: contents by name. `write_file`: creates a file
    and makes it durable; default through the page cache. Raises `PeerError` if a file
    does not have the hash that the layout lists, `UsageError` if the folder exists or cannot be written (disk full);
    then nothing is left behind.
    """
    folder = Path(folder)
    if folder.exists():
        raise UsageError(f"{folder} exists already. Remove it, or choose another folder.")
    check_files(layout, files)
    write = write_file or _write_file
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        for planned in plan_files(layout, shard_bytes):
            write(partial / planned.name, _parts(planned, bits))
        for name, data in files.items():
            write(partial / name, [data])
        _sync_folder(partial)
        partial.rename(folder)
        _sync_folder(folder.parent)
    except OSError as error:
        raise UsageError(f"Cannot write {folder}: {error.strerror}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class PlannedFile(NamedTuple):
    """A file of a checkpoint to write: `head`, then the data of `tensors`, in this order without gaps."""

    name: str
    head: bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def offsets(self) -> dict[str, int]:
        """By tensor: the offset of its first byte in the file."""
        ends = accumulate((tensor.nbytes for tensor in self.tensors), initial=len(self.head))
        return dict(zip((tensor.name for tensor in self.tensors), ends, strict=False))

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors)


def check_files(layout: Layout, files: Mapping[str, bytes]) -> None:
    """Raise `PeerError` if one of `files` does not have the hash that the layout lists."""
    for spec in layout.files:
        if spec.name in files and blake3(files[spec.name]).digest() != spec.hash:
            raise PeerError(f"file {spec.name}: its hash differs from the layout's")


def plan_files(layout: Layout, shard_bytes: int = _SHARD_BYTES) -> list[PlannedFile]:
    """The shards of a checkpoint, and their index if there are several; then `PARTS_FILE` if the layout has tensors
    beyond the base. The plan depends on the arguments only."""
    base = [tensor for tensor in layout.tensors if tensor.name < "~"]
    shards: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for tensor in base:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    names = (
        [_SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    planned = [_shard(name, shard) for name, shard in zip(names, shards, strict=True)]
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in base)}, "weight_map": weight_map}
        planned.append(PlannedFile(_INDEX, json.dumps(index, indent=2).encode(), ()))
    if len(base) < len(layout.tensors):
        planned.append(_shard(PARTS_FILE, list(layout.tensors[len(base) :])))
    return planned


def _shard(name: str, tensors: list[TensorSpec]) -> PlannedFile:
    """A safetensors file. Tensors of whole pages come first, so that their blocks can be written around the page cache;
    then wider dtypes before narrower ones. So all are aligned."""
    tensors = sorted(tensors, key=lambda tensor: (tensor.nbytes % _PAGE_BYTES != 0, -tensor.type.itemsize, tensor.name))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _PAGE_BYTES)
    return PlannedFile(name, len(header).to_bytes(8, "little") + header, tuple(tensors))


def _parts(planned: PlannedFile, bits: Parts) -> Iterable[bytes | memoryview | int]:
    """The content of a planned file."""
    yield planned.head
    for tensor in planned.tensors:
        found, elements = bits(tensor.name), 0
        for part in (found,) if isinstance(found, np.ndarray) else found:
            if isinstance(part, int):
                elements += part
                yield part * tensor.type.itemsize
                continue
            data = np.ascontiguousarray(part)
            assert data.dtype == tensor.type.bits, tensor.name
            elements += data.size
            yield data.view(np.uint8).data
        assert elements == tensor.elements, tensor.name


def _write_file(path: Path, parts: Iterable[bytes | memoryview | int]) -> None:
    with path.open("xb") as stream:
        for part in parts:
            if isinstance(part, int):
                stream.seek(part, os.SEEK_CUR)
            else:
                stream.write(part)
        stream.truncate()
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
