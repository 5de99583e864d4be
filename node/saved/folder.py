"""The fragments that a node holds for its swarm, on its disk.

    state/SERIAL/record            the signed record
    state/SERIAL/N.fragment        fragment N, every segment of which has the digest in the record
    state/SERIAL/N.fragment.tmp    one that is coming, as far as it has come
    state/SERIAL/settled           the whole state is placed: older ones were dropped

A node holds them under a lease of its own clock: `KEEP_S` after the seed last said that it wants them, they are
removed. That is long, because they are for the case that the seed is gone.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from codec.errors import PeerError
from node.saved.coding import FREE_SHARE, RECORD, fragment_name
from node.saved.messages import STATES_HELD, HeldState
from node.saved.record import StateRecord, open_record
from swarm.store.disk import TEMPORARY, Disk

__all__ = ["KEEP_S", "ComingFragment", "FragmentFolder", "NoRoom"]

KEEP_S: Final = 30 * 86_400.0
"""Thirty days: longer than anybody takes to notice that a run has ended, and short enough for a rented disk."""
_SETTLED: Final = "settled"
_READ_BYTES: Final = 1 << 20


class NoRoom(PeerError):
    """This node has no room for the fragment; the text says so, and goes to the seed."""


class FragmentFolder:
    """The folder `state` of a swarm's store. All methods may block. One process at a time, which holds the store."""

    def __init__(
        self,
        folder: Path,
        swarm: bytes,
        budget_bytes: int,
        *,
        clock: Callable[[], float] = time.time,
        disk: Disk | None = None,
    ) -> None:
        """`budget_bytes`: for all fragments together. `clock`: Unix time."""
        self._folder, self._swarm, self._budget_bytes, self._clock = folder, swarm, budget_bytes, clock
        self._disk = disk or Disk()
        self._records: dict[int, tuple[StateRecord, bytes]] = {}
        self._open_all()

    def _open_all(self) -> None:
        """Find what an earlier run held. What does not verify is removed."""
        for folder in sorted(self._folder.glob("*")):
            try:
                sealed = (folder / RECORD).read_bytes()
                record = open_record(sealed, self._swarm)
                if folder.name != _name(record.serial):
                    raise PeerError("saved state: in the folder of another one")
            except (OSError, PeerError):
                self._disk.remove(folder)
                continue
            self._records[record.serial] = record, sealed
        self.drop_expired()

    # ------------------------------------------------------------ what is here

    @property
    def used_bytes(self) -> int:
        """Bytes that are held or promised: a fragment counts whole once its first byte may come."""
        return sum(
            record.fragment_bytes
            * len(set(self._numbers(record.serial, TEMPORARY)) | set(self._numbers(record.serial)))
            for record, _ in self._records.values()
        )

    def held(self) -> tuple[HeldState, ...]:
        """The fragments that are here whole, the newest state first: of at most `STATES_HELD` states. There are more
        when a seed has adopted a state that is older than one that was cut off here."""
        newest = sorted(self._records.items(), reverse=True)[:STATES_HELD]
        return tuple(HeldState(sealed, tuple(sorted(self._numbers(serial)))) for serial, (_, sealed) in newest)

    def _numbers(self, serial: int, suffix: str = "") -> list[int]:
        found = []
        for path in (self._folder / _name(serial)).glob(f"*.fragment{suffix}"):
            if (match := re.fullmatch(rf"(\d{{1,3}})\.fragment{re.escape(suffix)}", path.name)) is not None:
                found.append(int(match[1]))
        return found

    def open_segment(self, serial: int, fragment: int, segment: int) -> tuple[BinaryIO, int] | None:
        """A file at the start of a segment, which the caller closes, and the segment's bytes; None: it is not here."""
        found = self._records.get(serial)
        if found is None or segment >= found[0].segments or fragment >= found[0].total:
            return None
        try:
            file = open(self._folder / _name(serial) / fragment_name(fragment), "rb")  # noqa: SIM115 - the caller's
        except FileNotFoundError:
            return None
        file.seek(segment * found[0].segment_bytes)
        return file, found[0].bytes_of_segment(segment)

    # ------------------------------------------------------------ changes, by the seed only

    def begin(self, sealed: bytes, fragment: int, whole: int) -> "ComingFragment | None":
        """Prepare to take a fragment; None when it is here already. `whole`: the serial of the last state that is
        placed whole; 0: the seed knows of none. Older states than this one were cut off, and go, except that one and
        the settled one here. While the seed knows of none, the newest older ones stay: one of them may be whole.

        The caller calls `resume` on what it gets, without a lock: it may take minutes.

        Raises `PeerError` for a record that the swarm's key has not signed or that is older than a settled one, and
        `NoRoom`.
        """
        record = open_record(sealed, self._swarm)
        if fragment >= record.total:
            raise PeerError(f"saved state: it has {record.total} fragments, not a fragment {fragment}")
        newest = max((serial for serial in self._records if self._is_settled(serial)), default=-1)
        if record.serial < newest:
            raise PeerError(f"saved state: {record.serial} is older than {newest}, which is settled")
        known = self._records.get(record.serial)
        if known is not None and known[1] != sealed:
            raise PeerError(f"saved state: there is another one with the serial {record.serial}")
        if fragment in self._numbers(record.serial):
            return None
        older = sorted(
            (serial for serial in self._records if serial < record.serial and serial != newest), reverse=True
        )
        kept = [whole] if whole else older[: STATES_HELD - 1 - (newest >= 0)]
        for other in older:
            if other not in kept:
                self._drop(other)
        folder = self._folder / _name(record.serial)
        if fragment not in self._numbers(record.serial, TEMPORARY):
            self._check_room(record)
        if known is None:
            with self._disk.errors(folder):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._disk.write_whole(folder / RECORD, sealed)
            self._disk.sync_folder(self._folder)
            self._records[record.serial] = record, sealed
        return ComingFragment(self._disk, folder / fragment_name(fragment), record, fragment)

    def _check_room(self, record: StateRecord) -> None:
        used = self.used_bytes
        if used + record.fragment_bytes > self._budget_bytes:
            raise NoRoom(
                f"{record.fragment_bytes} bytes more would be above the {self._budget_bytes} bytes that "
                "this node gives (join --state-gb)"
            )
        disk = shutil.disk_usage(self._folder.parent)
        if disk.free - self._promised_bytes() - record.fragment_bytes < FREE_SHARE * disk.total:
            raise NoRoom("its disk is nearly full")

    def _promised_bytes(self) -> int:
        """Bytes of fragments that are coming, and are not on the disk yet."""
        promised = 0
        for serial, (record, _) in self._records.items():
            for number in self._numbers(serial, TEMPORARY):
                path = self._folder / _name(serial) / (fragment_name(number) + TEMPORARY)
                with contextlib.suppress(FileNotFoundError):  # it is whole just now
                    promised += record.fragment_bytes - path.stat().st_size
        return promised

    def settle(self, serial: int) -> None:
        """The state is placed whole: drop older ones, and begin the lease anew. Nothing when it is not here."""
        if serial not in self._records:
            return
        if not self._is_settled(serial):
            self._disk.write_whole(self._folder / _name(serial) / _SETTLED, b"")
        for other in [other for other in self._records if other < serial]:
            self._drop(other)
        now = self._clock()
        os.utime(self._folder / _name(serial) / RECORD, (now, now))

    def drop_expired(self) -> None:
        """Drop the states that the seed has not asked for during `KEEP_S`."""
        for serial in list(self._records):
            with contextlib.suppress(FileNotFoundError):
                age_s = self._clock() - (self._folder / _name(serial) / RECORD).stat().st_mtime
                if age_s > KEEP_S:
                    self._drop(serial)

    def _is_settled(self, serial: int) -> bool:
        return (self._folder / _name(serial) / _SETTLED).exists()

    def _drop(self, serial: int) -> None:
        del self._records[serial]
        self._disk.remove(self._folder / _name(serial))


class ComingFragment:
    """A fragment on its way to the disk, segment by segment. Call `resume` first, and close it in any case; what has
    come stays for the next attempt."""

    def __init__(self, disk: Disk, path: Path, record: StateRecord, fragment: int) -> None:
        self._disk, self._path, self.record, self._fragment = disk, path, record, fragment
        self._temporary = path.with_name(path.name + TEMPORARY)
        with disk.errors(path):
            self._file = open(  # noqa: SIM115 - `close` closes it
                self._temporary, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600)
            )
        self.segment = 0
        """The segment that comes next."""
        self._hasher = blake3()
        self._left = 0

    def resume(self) -> None:
        """Hash what an earlier attempt left, which may take minutes, and go on after its last whole segment."""
        record = self.record
        self.segment = self._verified()
        self._file.truncate(self.segment * record.segment_bytes)
        self._file.seek(self.segment * record.segment_bytes)
        self._left = record.bytes_of_segment(self.segment) if self.segment < record.segments else 0

    def _verified(self) -> int:
        """How many whole segments an earlier attempt left."""
        record = self.record
        for segment in range(record.segments):
            hasher, left = blake3(), record.bytes_of_segment(segment)
            while left and (part := self._file.read(min(left, _READ_BYTES))):
                hasher.update(part)
                left -= len(part)
            if left or hasher.digest() != record.digest(self._fragment, segment):
                return segment
        return record.segments

    @property
    def left_bytes(self) -> int:
        """Bytes that are still to come."""
        return self.record.fragment_bytes - self._file.tell()

    def write(self, part: bytes | memoryview) -> None:
        """Write what comes next. Raises `PeerError` at the end of a segment that has another digest: it is cut off
        again."""
        view = memoryview(part)
        while view:
            some = view[: self._left]
            view = view[len(some) :]
            with self._disk.errors(self._path):
                self._file.write(some)
            self._hasher.update(some)
            self._left -= len(some)
            if not self._left:
                self._end_segment()

    def _end_segment(self) -> None:
        if self._hasher.digest() != self.record.digest(self._fragment, self.segment):
            self._file.truncate(self.segment * self.record.segment_bytes)
            raise PeerError(f"saved state: segment {self.segment} has another digest")
        self._hasher.reset()
        self.segment += 1
        if self.segment < self.record.segments:
            self._left = self.record.bytes_of_segment(self.segment)

    def finish(self) -> None:
        """All has come: make it durable, under its name. Raises `DiskFull`."""
        assert self.segment == self.record.segments
        with self._disk.errors(self._path):
            self._file.flush()
        self._disk.sync(self._file.fileno(), self._path)
        self._disk.put_in_place(self._temporary, self._path)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def _name(serial: int) -> str:
    return f"{serial:016x}"
