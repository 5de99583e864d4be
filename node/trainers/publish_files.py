"""Publishes checkpoint folders and raw files, for `swarm-node publish FOLDER` and `swarm-node publish --raw FILE`.

The seed reads and codes them, since it has the model mapped and the coder loaded. Where it cannot (it runs in a
container, or is an older release), this process does it (`node.trainers.publish_here`). What is imported here is what a
short-lived command needs; everything heavier is imported where it is used.
"""

import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from codec.errors import PeerError, UsageError
from node.host.stamp import Stamp, stamp
from node.ipc.channel import ChannelClosed, ChannelTimeout, close_fds, connect
from node.trainers.errors import PublishFailed, SwarmDown, SwarmTimeout
from node.trainers.file_messages import (
    ANSWER_WITHIN_S,
    PUBLISHED_WITHIN_S,
    SOCKET_NAME,
    FilesEncoded,
    FilesOpened,
    FilesPublished,
    FilesUnread,
    PublishFiles,
    Refusal,
)

__all__ = ["publish_file", "publish_folder"]

TRIES: Final = 4
"""How often a version is begun: more often than the seed is restarted meanwhile."""
RESTARTED_WITHIN_S: Final = 60.0
"""A seed that is restarted within this time after its end costs a publish nothing but the time."""
LOOK_S: Final = 0.2
"""Interval between two looks for a restarted seed."""

_FromSeed = FilesUnread | FilesOpened | FilesEncoded | FilesPublished | Refusal


class _Ended(NamedTuple):
    """How a request ended. `published`: None when the seed ended before it said so."""

    opened: FilesOpened
    encoded: FilesEncoded | None
    published: FilesPublished | None


def publish_folder(
    home: Path,
    folder: Path,
    *,
    step: int = 0,
    everywhere: bool = False,
    as_it_was: Stamp | None = None,
    draft: Path | None = None,
) -> dict[str, Any]:
    """Publish the checkpoint in `folder` through the seed of `home`, and return plain values about the version.

    Needs no torch. Float32 tensors of a half-precision base are rounded and half-precision tensors of a float32 base
    widened, as in `Swarm.publish`. `everywhere`: also wait until every live node holds the version. `as_it_was`: the
    files when the checkpoint was found complete; by default as they are now. `draft`: the folder of the draft model's
    new weights, which this process reads; None: it stays as it is. Raises `Unreachable` without a seed,
    `UsageError` when the checkpoint is of another model or is written to while it is read (the version is not sealed
    then), and what `Swarm.publish` and `Publication.wait` raise.
    """
    found = None if draft is not None else _by_seed(home, folder, as_it_was, raw=False, step=step)
    if found is None:
        from node.trainers.publish_here import publish_folder_here

        return publish_folder_here(home, folder, step=step, everywhere=everywhere, as_it_was=as_it_was, draft=draft)
    return _report(home, found, step, everywhere)


def publish_file(home: Path, file: Path, *, step: int = 0, everywhere: bool = False) -> dict[str, Any]:
    """Publish any file through the seed of `home`, which must have been started for files (`--raw-mb`).

    For the format see `node.host.raw`; for the values returned and the errors, `publish_folder`.
    """
    found = _by_seed(home, file, None, raw=True, step=step)
    if found is None:
        from node.trainers.publish_here import publish_file_here

        return publish_file_here(home, file, step=step, everywhere=everywhere)
    return _report(home, found, step, everywhere)


def _by_seed(home: Path, path: Path, as_it_was: Stamp | None, *, raw: bool, step: int) -> _Ended | None:
    """Have the seed publish `path`, again if it is restarted meanwhile. None: this process has to, or nothing can."""
    try:
        path = path.expanduser().resolve()  # first: a link and its file have different names
        asked = PublishFiles(str(path), raw, stamp(path) if as_it_was is None else as_it_was, step)
    except OSError:
        return None  # reading the files raises the error
    for _ in range(TRIES):
        found = _ask(home, asked)
        if found is None or found.published is not None:
            return found
        head = _restarted(home)
        if head is None:
            return None
        opened, encoded = found.opened, found.encoded
        if encoded is not None and head == ((opened.epoch, opened.version), encoded.root.hex()):
            return found  # the seed sealed it, and only its answer was lost
    return None


def _ask(home: Path, asked: PublishFiles) -> _Ended | None:
    """One request. None: nothing has been begun. Raises what the seed refuses it with, `SwarmTimeout`."""
    opened: FilesOpened | None = None
    encoded: FilesEncoded | None = None
    deadline = time.monotonic() + PUBLISHED_WITHIN_S
    try:
        with connect(home / SOCKET_NAME, _FromSeed) as channel:
            channel.send(asked, timeout_s=ANSWER_WITHIN_S)
            while True:
                message, fds = channel.recv(max(0.0, deadline - time.monotonic()))
                close_fds(fds)
                match message:
                    case FilesOpened():
                        opened = message
                    case FilesEncoded():
                        encoded = message
                    case FilesPublished() if opened is not None and encoded is not None:
                        return _Ended(opened, encoded, message)
                    case Refusal(why, usage):
                        raise (UsageError if usage else PublishFailed)(why)
                    case _:
                        return None
    except ChannelTimeout as error:
        raise SwarmTimeout(f"{asked.path} was not published within {PUBLISHED_WITHIN_S:.0f} s.") from error
    except (ChannelClosed, PeerError):  # an older seed closes the connection, too
        return None if opened is None else _Ended(opened, encoded, None)


def _restarted(home: Path) -> tuple[tuple[int, int] | None, str] | None:
    """Wait for the seed of `home` to be started again: its head and the head's root. None when it is not."""
    from node.trainers.connection.seedlink import ask_state

    deadline = time.monotonic() + RESTARTED_WITHIN_S
    while time.monotonic() < deadline:
        try:
            swarm = ask_state(home).swarm
            return swarm.head, swarm.root
        except (SwarmDown, SwarmTimeout):  # also from the dying seed, whose socket still takes connections
            time.sleep(LOOK_S)
    return None


def _report(home: Path, found: _Ended, step: int, everywhere: bool) -> dict[str, Any]:
    opened, encoded = found.opened, found.encoded
    assert encoded is not None
    if everywhere:
        _await_nodes(home, opened, step)
    return {
        "epoch": opened.epoch,
        "version": opened.version,
        "root": encoded.root.hex(),
        "changed": encoded.changed,
        "density": encoded.changed / max(1, encoded.elements),
        "delta_bytes": None if found.published is None else found.published.delta_bytes,
        "full_bytes": encoded.full_bytes,
        "seconds": {} if found.published is None else found.published.seconds,
    }


def _await_nodes(home: Path, opened: FilesOpened, step: int) -> None:
    """Wait until every live node holds the version. Raises `SwarmTimeout`, `SwarmDown`."""
    from functools import partial

    from node.trainers.publish.publication import Publication
    from node.trainers.standing import holders

    publication = Publication(step, _holders=partial(holders, home))
    publication.note_opened(opened.epoch, opened.version)
    publication.end()
    publication.wait(1.0, PUBLISHED_WITHIN_S)
