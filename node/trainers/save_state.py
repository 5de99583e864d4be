"""Saves a state of the trainer (its optimizer's, for example) into the swarm, for `Swarm.save_state` and the command.

A thread brings the bytes into a file in the seed's home, unless they are in a file already, and asks the seed to code
it and to place it with nodes. If the seed is started again meanwhile, it is asked again.
"""

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

from codec.errors import PeerError, SwarmError, UsageError
from node.ipc.channel import ChannelClosed, ChannelTimeout, close_fds, connect
from node.saved.coding import FREE_SHARE
from node.trainers.connection.patience import Wait
from node.trainers.errors import PublishFailed, SwarmDown, SwarmTimeout
from node.trainers.file_messages import ANSWER_WITHIN_S, SOCKET_NAME, Refusal
from node.trainers.state_messages import SaveState, StateAnswers, StateProgress, StateSaved

__all__ = ["SPOOLED", "StateSaving", "StateSource", "save_state"]

SPOOLED: Final = "state/.coming-"
"""How the files in the seed's home begin that hold a state until it is coded."""
SILENT_S: Final = 600.0
"""A seed that says nothing for so long is stuck: it reports several times a second."""
RESTARTED_WITHIN_S: Final = 60.0
"""A seed that is started again within this time is asked again."""
LOOK_S: Final = 0.2
_PART_BYTES: Final = 1 << 20
ROOM_EVERY_BYTES: Final = 64 << 20
"""Interval at which it is looked whether the disk has room for more."""


class Readable(Protocol):
    """A file that is open for reading, or what can be read like one."""

    def read(self, size: int, /) -> bytes: ...


StateSource = bytes | bytearray | memoryview | str | Path | Readable | Iterable[Any]
"""What is saved: bytes, the path of a file, an open file (one that can be set back: from its beginning, wherever it
stands), or an iterable of bytes."""


class StateSaving:
    """One state on its way into the swarm, as `Swarm.save_state` returns it. Read the fields, and call `wait`.

    `step`: as it was given. `stage`: "reading" (the bytes come into a file), "coding", "placing", "saved" or "failed".
    `done`, `total`: how far that stage is: bytes, or in "placing" fragments. `serial`: the state's number, and `size`:
    its bytes, once it is saved. `seconds`: since the call; when it has ended, until then. `error`: why it was not
    saved. The state before it stays.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stage = "reading"
        self.done = self.total = 0
        self.serial: int | None = None
        self.size: int | None = None
        self.fragments: tuple[int, int] | None = None
        """Once it is saved: how many fragments give it back, of how many."""
        self.nodes: tuple[str, ...] = ()
        """Addresses of nodes that hold fragments, for `swarm-node rescue --node`."""
        self.error: SwarmError | None = None
        self._began = time.monotonic()
        self._ended_s: float | None = None
        self._over = threading.Event()

    @property
    def seconds(self) -> float:
        """Seconds since the call; once it has ended, until then."""
        return time.monotonic() - self._began if self._ended_s is None else self._ended_s

    @property
    def over(self) -> bool:
        """Whether it is saved, or has failed."""
        return self._over.is_set()

    @property
    def saved(self) -> bool:
        """Whether every fragment is durable at a node."""
        return self._over.is_set() and self.error is None

    def wait(self, timeout_s: float = 3600.0) -> "StateSaving":
        """Wait until it is saved, and return it. Raises its `error` when it was not, `SwarmTimeout` after
        `timeout_s`."""
        wait = Wait(timeout_s, lambda: f"the state of step {self.step} is {self.stage}, {self.done} of {self.total}")
        while not self._over.wait(wait.slice_s()):
            if wait.over:
                raise SwarmTimeout(f"The state of step {self.step} was not saved within {timeout_s:.0f} s.")
            wait.log_if_due()
        if self.error is not None:
            raise self.error
        return self

    # ------------------------------------------------------------ for the thread

    def note(self, progress: StateProgress) -> None:
        """The seed says how far it is."""
        self.stage, self.done, self.total = progress.stage, progress.done, progress.total

    def end(self, saved: StateSaved | None, error: SwarmError | None = None) -> None:
        """It is saved, or was not."""
        if saved is not None:
            self.serial, self.size, self.fragments = saved.serial, saved.size, (saved.needed, saved.total)
            self.nodes = saved.nodes
        self.stage, self.error = "saved" if error is None else "failed", error
        self._ended_s = self.seconds
        self._over.set()


def save_state(home: Path, source: StateSource, step: int) -> StateSaving:
    """Save `source` through the seed of `home`, in a thread. See `Swarm.save_state`."""
    if not 0 <= step < 1 << 63:
        raise UsageError("step: 0 or more")
    saving = StateSaving(step)
    threading.Thread(target=_save, args=(home, source, saving), name="swarm-save-state", daemon=True).start()
    return saving


def _save(home: Path, source: StateSource, saving: StateSaving) -> None:
    spooled: Path | None = None
    saved: StateSaved | None = None
    failed: SwarmError | None = None
    try:
        if isinstance(source, str | Path):
            path = Path(source).expanduser().resolve()  # /dev/stdin is another file in the seed
        else:
            path = spooled = _new_spool(home)
            _spool(source, spooled, saving)
        saved = _ask_again(home, path, saving)
    except SwarmError as error:
        failed = error
    except Exception as error:  # of the caller's iterable or file: it is shown where the caller waits
        failed = PublishFailed(f"The state of step {saving.step} cannot be read: {type(error).__name__}: {error}")
        failed.__cause__ = error
    if spooled is not None:  # before the caller hears that it is over, who may look at the folder
        with contextlib.suppress(OSError):
            spooled.unlink(missing_ok=True)
    saving.end(saved, failed)


def _new_spool(home: Path) -> Path:
    """A new empty file, which nobody else has a name for."""
    path = home / f"{SPOOLED}{secrets.token_hex(16)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write the state to {path.parent}: {error.strerror}.")


def _spool(source: Any, path: Path, saving: StateSaving) -> None:
    """Write the source to the file `path`. Raises `UsageError` when nothing comes, or the disk has no room for it."""
    checked = -ROOM_EVERY_BYTES
    try:
        with open(path, "wb") as out:
            for part in _parts(source):
                view = memoryview(part).cast("B")
                for at in range(0, len(view), _PART_BYTES):
                    if saving.done - checked >= ROOM_EVERY_BYTES:
                        checked = saving.done
                        _check_room(path.parent)
                    saving.done += out.write(view[at : at + _PART_BYTES])
    except OSError as error:
        raise _cannot_write(path, error) from error
    if not saving.done:
        raise UsageError("The state is empty, so the one before it stays. Pass the bytes that the trainer needs.")


def _check_room(folder: Path) -> None:
    disk = shutil.disk_usage(folder)
    if disk.free < FREE_SHARE * disk.total:
        raise UsageError(
            f"The disk that holds {folder} has {disk.free / 1e9:.1f} GB left, too little for this state. Free some "
            "space, use a larger disk, or save a file."
        )


def _parts(source: Any) -> Iterable[Any]:
    """Its bytes. Of a file that can be set back the whole: after `torch.save` into it, it stands at its end."""
    if isinstance(source, bytes | bytearray | memoryview):
        return (source,)
    if hasattr(source, "read"):
        if hasattr(source, "seekable") and source.seekable():
            source.seek(0)
        return iter(lambda: source.read(_PART_BYTES), b"")
    return source


def _ask_again(home: Path, path: Path, saving: StateSaving) -> StateSaved:
    """Ask the seed, and again if it is started again meanwhile. Raises `SwarmDown` when it is not, and what it refuses
    with."""
    down_since: float | None = None
    while True:
        asked = time.monotonic()
        try:
            return _ask(home, path, saving)
        except SwarmDown:
            if down_since is None or asked - down_since > RESTARTED_WITHIN_S + LOOK_S:
                down_since = time.monotonic()
            if time.monotonic() - down_since > RESTARTED_WITHIN_S:
                raise
            time.sleep(LOOK_S)


def _ask(home: Path, path: Path, saving: StateSaving) -> StateSaved:
    try:
        with connect(home / SOCKET_NAME, StateAnswers | Refusal) as channel:
            channel.send(SaveState(str(path), saving.step), timeout_s=ANSWER_WITHIN_S)
            while True:
                message, fds = channel.recv(SILENT_S)
                close_fds(fds)
                match message:
                    case StateProgress():
                        saving.note(message)
                    case StateSaved():
                        return message
                    case Refusal(why, usage):
                        raise (UsageError if usage else PublishFailed)(why)
    except ChannelTimeout as error:
        raise SwarmTimeout(f"The seed of {home} has said nothing for {SILENT_S:.0f} s.") from error
    except ChannelClosed as error:
        raise SwarmDown(f"No seed serves {home}, or it ended ({error}).") from error
    except PeerError as error:
        raise SwarmDown(f"The seed of {home} is another release, which saves no states ({error}).") from error
