"""A file to the fragments of a saved state, and back; and all fragments from enough of them. In worker threads; memory
for one row and its parts.

A state is not compressed: most of its bits are those of random mantissas. Of Adam's moments in float32 zlib saves 6 to
9 %, at 20 MB/s; the slowest of the other steps is the code, at 180 MB/s or more.
"""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from blake3 import blake3

from codec.erasure import join_fragments, parity
from codec.errors import PeerError, UsageError
from codec.sign import Key
from node.saved.cipher import RowCipher
from node.saved.record import MAX_STATE_BYTES, TAG_BYTES, StateRecord, open_record, segment_rows_for
from swarm.store.disk import TEMPORARY, Disk

__all__ = [
    "FREE_SHARE",
    "RECORD",
    "CodedState",
    "Progress",
    "check_room",
    "code_file",
    "complete_fragments",
    "fragment_name",
    "join_file",
    "needed_of",
]

RECORD: Final = "record"
"""Beside the fragments of a state: its signed record. It is written last, so a folder without it is unfinished."""
FREE_SHARE: Final = 0.05
"""Of a disk, which stays free for the versions of the policy."""
Progress = Callable[[int, int], None]
"""Called with the bytes of content that are done, and those of all."""


class CodedState(msgspec.Struct, frozen=True):
    """A saved state whose fragments are in `folder`. `sealed`: its signed record."""

    record: StateRecord
    sealed: bytes
    folder: Path

    @classmethod
    def open(cls, folder: Path, swarm: bytes) -> "CodedState":
        """What an earlier run coded. Raises `PeerError` or `OSError` when it is not whole."""
        sealed = (folder / RECORD).read_bytes()
        record = open_record(sealed, swarm)
        for fragment in range(record.total):
            if (folder / fragment_name(fragment)).stat().st_size != record.fragment_bytes:
                raise PeerError(f"saved state: {fragment_name(fragment)} has another size")
        return cls(record, sealed, folder)

    def path(self, fragment: int) -> Path:
        """The file of a fragment."""
        return self.folder / fragment_name(fragment)


def fragment_name(fragment: int) -> str:
    """The name of a fragment's file."""
    return f"{fragment}.fragment"


def needed_of(total: int) -> int:
    """How many of `total` fragments give a state back: half of them, so that the other half may be lost."""
    return -(-total // 2)


def code_file(
    source: Path,
    folder: Path,
    key: Key,
    *,
    serial: int,
    step: int,
    total: int,
    progress: Progress = lambda done, size: None,
) -> CodedState:
    """Code the file `source` into `total` fragments in the new folder `folder`, durably, and sign their record.

    Raises `UsageError` when it is no file, is empty, cannot be read, changes meanwhile or is too large, or the disk is
    full; then the folder is left without a record.
    """
    disk = Disk()
    needed = needed_of(total)
    with _reading(source) as file:
        before = os.fstat(file.fileno())
        size = before.st_size
        if size > MAX_STATE_BYTES:
            raise UsageError(f"{source} has {size} bytes, and a saved state has at most {MAX_STATE_BYTES}.")
        record = StateRecord(
            key.public, serial, step, size, secrets.token_bytes(32), needed, total, segment_rows_for(size, needed), b""
        )
        with disk.errors(folder / RECORD), contextlib.ExitStack() as stack:
            folder.mkdir(parents=True, mode=0o700)
            check_room(folder, record)
            outs = [stack.enter_context(_new_file(folder / fragment_name(number))) for number in range(total)]
            digests = _write_rows(file, source, record, RowCipher(key, record), outs, progress)
            if os.fstat(file.fileno()).st_mtime_ns != before.st_mtime_ns:
                raise _written_to(source)
            for number, out in enumerate(outs):
                out.flush()
                disk.sync(out.fileno(), folder / fragment_name(number))
    record = msgspec.structs.replace(record, digests=digests)
    sealed = record.sign(key)
    disk.write_whole(folder / RECORD, sealed)
    disk.sync_folder(folder.parent)
    return CodedState(record, sealed, folder)


def check_room(folder: Path, record: StateRecord, here_bytes: int = 0) -> None:
    """The seed's versions need this disk, too. `here_bytes`: of the fragments, on the disk already. Raises
    `UsageError`."""
    usage, needs = shutil.disk_usage(folder), record.total * record.fragment_bytes - here_bytes
    if usage.free - needs < FREE_SHARE * usage.total:
        raise UsageError(
            f"The fragments of this state need {needs / 1e9:.1f} GB, and the disk that holds {folder.parent} has "
            f"{usage.free / 1e9:.1f} GB left. Free some space, or use a larger disk."
        )


def _write_rows(
    file: BinaryIO,
    source: Path,
    record: StateRecord,
    cipher: RowCipher,
    outs: list[BinaryIO],
    progress: Progress,
) -> bytes:
    """Write all rows to the fragments' files; returns the digests of all segments, in the record's order."""
    digests: list[list[bytes]] = [[] for _ in outs]
    hashers = [blake3() for _ in outs]
    done = 0
    for row in range(record.rows):
        content = file.read(record.content_of(row))
        if len(content) != record.content_of(row) or (row == record.rows - 1 and file.read(1)):
            raise _written_to(source)
        share = record.share_of(row)
        sealed = cipher.seal_row(row, content).ljust(record.needed * share, b"\0")
        parts = [memoryview(sealed)[at : at + share] for at in range(0, len(sealed), share)]
        for number, part in enumerate([*parts, *parity(parts, record.total)]):
            outs[number].write(part)
            hashers[number].update(part)
        if (row + 1) % record.segment_rows == 0 or row == record.rows - 1:
            for number, hasher in enumerate(hashers):
                digests[number].append(hasher.digest())
                hasher.reset()
        done += len(content)
        progress(done, record.size)
    return b"".join(digest for fragment in digests for digest in fragment)


def complete_fragments(
    folder: Path, record: StateRecord, sealed: bytes, progress: Progress = lambda done, size: None
) -> None:
    """Make all fragments of a saved state in `folder`, durably, from those that are there. Then write its record there.

    No key is needed: what is computed is ciphertext. Every segment of every fragment is compared with the record.
    Raises `PeerError` when there are too few fragments, or one has another digest than the record says: if that one
    was there before, it is removed.
    """
    disk = Disk()
    here = [number for number in range(record.total) if (folder / fragment_name(number)).exists()]
    chosen = here[: record.needed]
    if len(chosen) < record.needed:
        raise PeerError(f"saved state: {len(chosen)} fragments are here, and {record.needed} are needed")
    missing = [number for number in range(record.total) if number not in chosen]
    temporaries = {number: folder / (fragment_name(number) + TEMPORARY) for number in missing}
    with disk.errors(folder / RECORD), contextlib.ExitStack() as stack:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
        files = {number: stack.enter_context(open(folder / fragment_name(number), "rb")) for number in chosen}
        outs = {number: stack.enter_context(_new_file(path)) for number, path in temporaries.items()}
        hashers = [blake3() for _ in range(record.total)]
        for row in range(record.rows):
            parts = {number: file.read(record.share_of(row)) for number, file in files.items()}
            for number, part in parts.items():  # before they are joined: a wrong one makes all others wrong
                hashers[number].update(part)
            if any(len(part) != record.share_of(row) for part in parts.values()):
                raise _damaged(folder, min(parts, key=lambda number: len(parts[number])))
            content = join_fragments(parts, record.needed)
            every = [*content, *parity(content, record.total)]
            for number, out in outs.items():
                out.write(every[number])
                hashers[number].update(every[number])
            if (row + 1) % record.segment_rows == 0 or row == record.rows - 1:
                _check_segment(folder, record, row // record.segment_rows, chosen, hashers)
            progress(min(record.size, (row + 1) * record.row_bytes), record.size)
        for number, out in outs.items():
            out.flush()
            disk.sync(out.fileno(), temporaries[number])
    for number, temporary in temporaries.items():
        disk.put_in_place(temporary, folder / fragment_name(number))
    disk.write_whole(folder / RECORD, sealed)


def _check_segment(folder: Path, record: StateRecord, segment: int, chosen: list[int], hashers: list[blake3]) -> None:
    """Compare a segment of each fragment with the record; those first that the others were computed from."""
    for number in sorted(range(record.total), key=lambda number: (number not in chosen, number)):
        if hashers[number].digest() != record.digest(number, segment):
            if number in chosen:
                raise _damaged(folder, number)
            raise PeerError(f"saved state: segment {segment} of fragment {number} has another digest when computed")
        hashers[number].reset()


def _damaged(folder: Path, fragment: int) -> PeerError:
    """Remove a fragment that was here, so that it is fetched again."""
    Disk().remove(folder / fragment_name(fragment))
    return PeerError(f"saved state: fragment {fragment} has changed on this disk")


def join_file(
    fragments: Mapping[int, Path],
    record: StateRecord,
    key: Key,
    out: Path,
    progress: Progress = lambda done, size: None,
) -> None:
    """Write the content of a saved state to the new file `out`, from fragments whose segments have been verified.

    It is complete or absent. Raises `UsageError` when `out` exists or cannot be written, and `PeerError` when the
    content does not open: with another key, or when a fragment is not what was verified.
    """
    cipher, disk = RowCipher(key, record), Disk()
    if out.exists():
        raise UsageError(f"{out} exists already. Remove it, or choose another file.")
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        with contextlib.ExitStack() as stack, disk.errors(out):
            chosen = sorted(fragments)[: record.needed]
            files = {number: stack.enter_context(open(fragments[number], "rb")) for number in chosen}
            to = stack.enter_context(_new_file(temporary))
            for row in range(record.rows):
                share = record.share_of(row)
                parts = {number: file.read(share) for number, file in files.items()}
                if any(len(part) != share for part in parts.values()):
                    raise PeerError("saved state: a fragment is too short")
                joined = b"".join(join_fragments(parts, record.needed))
                to.write(cipher.open_row(row, joined[: record.content_of(row) + TAG_BYTES]))
                progress(min(record.size, (row + 1) * record.row_bytes), record.size)
            to.flush()
            disk.sync(to.fileno(), out)
        disk.put_in_place(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def _written_to(source: Path) -> UsageError:
    return UsageError(f"{source} was written to while it was read. Save it again, once it is complete.")


def _reading(source: Path) -> BinaryIO:
    """Open it without waiting, as opening a pipe would. Raises `UsageError` unless it is a file with content."""
    try:
        file = open(source, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"Cannot read {source}: {error.strerror}.") from error
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and found.st_size:
        return file
    file.close()
    what = "is empty" if stat.S_ISREG(found.st_mode) else "is no regular file, but a device or pipe, for example"
    raise UsageError(f"{source} {what}. The state before it stays: save a file that has the whole state.")


def _new_file(path: Path) -> BinaryIO:
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600))
