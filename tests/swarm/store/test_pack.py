"""Extents written whole or by pieces, past the page cache or through it, and found again."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.store.disk import PAGE_BYTES, Disk
from swarm.store.pack import Pack


class Buffered(Disk):
    """Where the system cannot write past its page cache."""

    def open_unbuffered(self, path: Path) -> int | None:
        return None


class Refusing(Disk):
    """A file system that opens such files, and then does not take what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[int] = []

    def open_unbuffered(self, path: Path) -> int | None:
        self.refused.append(os.open(path, os.O_WRONLY))
        return self.refused[-1]

    def write_pages(self, descriptor: int, parts: Sequence[bytes], offset: int, path: Path) -> int:
        if descriptor in self.refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().write_pages(descriptor, parts, offset, path)


CHUNKS = [
    (b"h" * 700, [os.urandom(65_536) for _ in range(3)]),
    (b"i" * 40, [b"x"]),
    (b"j" * (PAGE_BYTES - 16 - 4), [b"1234"]),  # fills its page
    (b"k" * 100, [os.urandom(1_500_001), os.urandom(3_000_000)]),  # more than is written at a time
]


@pytest.mark.parametrize("kind", [Disk, Buffered, Refusing])
def test_what_is_put_is_found(tmp_path: Path, kind: type[Disk]) -> None:
    path = tmp_path / "pack"
    pack = Pack(path, kind())
    places = []
    for number, (header, parts) in enumerate(CHUNKS):
        body = b"".join(parts)
        if number == 1:  # piece by piece, among the others
            at = pack.add(header, len(body))
            pack.write(parts, at)
        else:
            at = pack.put(header, parts)
        assert pack.read(at, len(body)) == body
        places.append((header, at, len(body)))
    pack.sync()
    pack.close()
    assert path.stat().st_size % PAGE_BYTES == 0 or kind is not Disk
    again = Pack(path, kind())
    assert [tuple(extent) for extent in again.scan()] == places
    for (_, parts), (_, at, size) in zip(CHUNKS, places, strict=True):
        assert again.read(at, size) == b"".join(parts)
    more = again.put(b"later", [b"one more"])
    assert more > places[-1][1]
    assert [extent.header for extent in again.scan()] == [header for header, _ in CHUNKS] + [b"later"]
    again.close()


def test_what_is_written_leaves_nothing_of_what_was_written_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    disk = Disk()
    descriptor = os.open(path, os.O_RDWR)
    try:
        assert disk.write_pages(descriptor, [b"\xff" * PAGE_BYTES], 0, path) == PAGE_BYTES
        assert disk.write_pages(descriptor, [b"a", b"b"], PAGE_BYTES, path) == PAGE_BYTES
    finally:
        os.close(descriptor)
    assert path.read_bytes() == b"\xff" * PAGE_BYTES + b"ab" + bytes(PAGE_BYTES - 2)
