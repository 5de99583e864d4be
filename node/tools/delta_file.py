"""A version's delta as one file: what `swarm-node delta --out` writes and `swarm-node apply` reads.

Contents in order: magic, public key (of a key made for this file alone), the new layout, the small files that differ,
every chunk, the manifest. All lengths are u32, little-endian. The reader verifies every signature and bound before it
uses what they cover.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from codec.chunk import MAX_HEADER_BYTES, Chunk, ChunkHeader, open_header, verify_piece
from codec.errors import PeerError, UsageError
from codec.layout import MAX_LAYOUT_BYTES, Layout
from codec.manifest import MAX_MANIFEST_BYTES, Manifest, open_manifest

__all__ = ["DeltaFile", "DeltaWriter"]

_MAGIC: Final = b"SWDELTA1"
_LENGTH: Final = struct.Struct("<I")
_MAX_FILE_BYTES: Final = 64 << 20
_MAX_FILES: Final = 256


class DeltaWriter:
    """Writes to a temporary file beside `path`; `finish` makes it durable and renames it to `path`."""

    def __init__(self, path: str | os.PathLike[str], public: bytes, layout: Layout, files: Mapping[str, bytes]) -> None:
        """`files`: small files of the new version that the old one lacks or has different. Raises `UsageError`."""
        self.path = Path(path)
        self._partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        if self.path.exists():
            raise UsageError(f"{self.path} exists already. Remove it, or choose another name for --out.")
        try:
            self._stream: BinaryIO = self._partial.open("xb")
            self._stream.write(_MAGIC + public)
            self._put(layout.to_bytes())
            self._stream.write(_LENGTH.pack(len(files)))
            for name, data in sorted(files.items()):
                self._put(name.encode())
                self._put(data)
        except OSError as error:
            raise self._failed(error) from error

    def _put(self, data: bytes) -> None:
        self._stream.write(_LENGTH.pack(len(data)))
        self._stream.write(data)

    def _failed(self, error: OSError) -> UsageError:
        self.abandon()
        return UsageError(f"Cannot write {self.path}: {error.strerror}.")

    def add_chunk(self, chunk: Chunk) -> None:
        """Append a chunk. Raises `UsageError` when the disk is full."""
        try:
            self._put(chunk.header)
            self._stream.write(chunk.body)
        except OSError as error:
            raise self._failed(error) from error

    def finish(self, sealed_manifest: bytes) -> None:
        """Append the manifest and rename the file to `path`. Raises `UsageError` when the disk is full."""
        try:
            self._stream.write(_LENGTH.pack(0))
            self._put(sealed_manifest)
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._partial.rename(self.path)
        except OSError as error:
            raise self._failed(error) from error

    def abandon(self) -> None:
        """Remove the temporary file. Does nothing after `finish`."""
        if hasattr(self, "_stream"):
            self._stream.close()
        self._partial.unlink(missing_ok=True)


class DeltaFile:
    """A delta file, mapped. The constructor verifies it, and raises `UsageError` for a damaged or other file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                if size < len(_MAGIC) + 32:
                    raise PeerError("too short")
                self._data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
            self._at = 0
            self._read()
        except PeerError as error:
            raise UsageError(
                f"{self.path} is not a delta file, or is damaged: {error}. Make or fetch it again."
            ) from error
        except OSError as error:
            raise UsageError(f"Cannot read {self.path}: {error.strerror}.") from error

    def _take(self, length: int, field: str) -> bytes:
        if length > len(self._data) - self._at:
            raise PeerError(f"{field}: ends too soon")
        self._at += length
        return bytes(self._data[self._at - length : self._at])

    def _sized(self, most: int, field: str) -> bytes:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, field))
        if length > most:
            raise PeerError(f"{field}: {length} bytes, at most {most}")
        return self._take(length, field)

    def _read(self) -> None:
        if self._take(len(_MAGIC), "magic") != _MAGIC:
            raise PeerError("magic: another kind of file")
        self.public = self._take(32, "public key")
        self.layout = Layout.from_bytes(self._sized(MAX_LAYOUT_BYTES, "layout"))
        self.files = self._read_files()
        self._chunks: list[tuple[ChunkHeader, int]] = []
        ids: list[bytes] = []
        while sealed := self._sized(MAX_HEADER_BYTES, "chunk"):
            header = open_header(sealed, self.public)
            self._chunks.append((header, self._at))
            ids.append(blake3(sealed).digest())
            self._at += header.body_bytes
            if self._at > len(self._data):
                raise PeerError("chunk: ends too soon")
        self.manifest: Manifest = open_manifest(self._sized(MAX_MANIFEST_BYTES, "manifest"), self.public)
        if tuple(ids) != self.manifest.chunk_ids:
            raise PeerError("chunks: not those of the manifest")
        if self.manifest.layout_hash != self.layout.hash:
            raise PeerError("layout: not that of the manifest")
        if self._at != len(self._data):
            raise PeerError("end: bytes too many")

    def _read_files(self) -> dict[str, bytes]:
        (count,) = _LENGTH.unpack(self._take(_LENGTH.size, "files"))
        if count > _MAX_FILES:
            raise PeerError(f"files: {count}, at most {_MAX_FILES}")
        specs = {file.name: file for file in self.layout.files}
        files: dict[str, bytes] = {}
        for _ in range(count):
            name = self._sized(512, "file name").decode(errors="replace")
            data = self._sized(_MAX_FILE_BYTES, "file")
            if name not in specs or blake3(data).digest() != specs[name].hash:
                raise PeerError(f"file {name[:40]!r}: not one of the layout's")
            files[name] = data
        return files

    @property
    def headers(self) -> Iterator[ChunkHeader]:
        """The verified headers of all chunks, in order."""
        return (header for header, _ in self._chunks)

    def body(self, index: int) -> memoryview:
        """The body of chunk `index`, after verifying every piece. Raises `PeerError`."""
        header, at = self._chunks[index]
        body = self._data[at : at + header.body_bytes]
        for piece in range(header.n_pieces):
            span = header.piece_range(piece)
            verify_piece(header, piece, body[span.start : span.stop])
        return body
