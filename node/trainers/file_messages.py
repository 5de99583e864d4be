"""The messages by which a command has the seed publish files, over the same socket as `node.trainers.messages`.

    PublishFiles ---> FilesUnread                                      the command has to read them itself
    PublishFiles ---> FilesOpened, FilesEncoded, FilesPublished        the seed has read and published them

A module of its own, since a command that only asks needs neither numpy nor trio: importing them would take longer than
everything else that it does.
"""

from typing import Annotated, Final

import msgspec

__all__ = [
    "ANSWER_WITHIN_S",
    "PUBLISHED_WITHIN_S",
    "SOCKET_NAME",
    "FileAnswers",
    "FilesEncoded",
    "FilesOpened",
    "FilesPublished",
    "FilesUnread",
    "PublishFiles",
    "Refusal",
]

SOCKET_NAME: Final = "trainer.sock"
"""Name of the seed's Unix socket in its SWARM_HOME."""
ANSWER_WITHIN_S: Final = 30.0
"""The seed answers between two events of its loop, or after a disk write. A seed that takes longer is stuck."""
PUBLISHED_WITHIN_S: Final = 600.0
"""For the seed to take the version, and for nodes to hold it: as `Swarm.publish` and `Publication.wait`."""

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class PublishFiles(msgspec.Struct, frozen=True, tag="files"):
    """Asks the seed to publish the checkpoint folder at `path`, or with `raw` the file.

    `files`: as the command saw them (`node.host.stamp.Stamp`). `step`: the trainer's own count, for people; 0: none.
    """

    path: str
    raw: bool
    files: tuple[tuple[str, U63, int], ...]
    step: U63 = 0


class FilesUnread(msgspec.Struct, frozen=True, tag="files-unread"):
    """The seed does not see these files as they are in `files` (it runs in a container, for example), or is still
    loading what it codes them with."""


class FilesOpened(msgspec.Struct, frozen=True, tag="files-opened"):
    """The version has a name, which is durable."""

    epoch: U32
    version: U63


class FilesEncoded(msgspec.Struct, frozen=True, tag="files-encoded"):
    """Everything was read, and is being sealed. `root`: the version's. `changed`: elements whose bits differ, of
    `elements` in the model. `full_bytes`: the model's."""

    root: Hash
    changed: U63
    elements: U63
    full_bytes: U63


class FilesPublished(msgspec.Struct, frozen=True, tag="files-published"):
    """The version is durable, signed and on its way. `delta_bytes`: its payload. `seconds`: how long each part took."""

    delta_bytes: U63
    seconds: dict[str, float]


FileAnswers = FilesUnread | FilesOpened | FilesEncoded | FilesPublished
"""What the seed answers, besides `Refusal`."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The seed refuses, and why. `usage`: the user can fix it. The connection ends."""

    why: str
    usage: bool = False
