"""Packs: extents written at once or piece by piece, around the page cache or through it, are found again."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.store.disk import PAGE_BYTES, Disk
from swarm.store.pack import Pack


class Buffered(Disk):
    """A system that cannot write around its page cache."""

    def open_unbuffered(self, path: Path) -> int | None:
        return None


class Refusing(Disk):
    """A file system that opens files with O_DIRECT, but then refuses to write them."""

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
    (b"k" * 100, [os.urandom(1_500_001), os.urandom(3_000_000)]),  # more than one write
]


@pytest.mark.parametrize("kind", [Disk, Buffered, Refusing])
def test_extents_are_found_by_a_scan(tmp_path: Path, kind: type[Disk]) -> None:
    path = tmp_path / "pack"
    pack = Pack(path, kind())
    places = []
    for number, (header, parts) in enumerate(CHUNKS):
        body = b"".join(parts)
        if number == 1:  # piece by piece
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


def test_padding_contains_nothing_of_earlier_writes(tmp_path: Path) -> None:
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
