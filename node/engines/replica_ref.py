"""A node's replica as its engine host is told of it."""

from dataclasses import dataclass
from pathlib import Path

from codec import Layout
from codec.adapter import AdapterSlots
from node.engines.base import Version

__all__ = ["ReplicaRef"]


@dataclass(frozen=True, slots=True)
class ReplicaRef:
    """The node's replica, from which an engine is filled. `fd` stays the replica's; `folder` has config and tokenizer.
    `layout`: of the base, as `version` and `root` are. `window_fd`: memory into which the engine's blocks will be
    read back (`node.engines.window`); None: they will not. `slots`: the swarm's room for adapters. `draft`: the folder
    of the draft model's small files, if the engine is to load it; it is in the layout then.

    The replica may move on at any time. The bits that are read then do not match `root`, and the reload finds out."""

    layout: Layout
    fd: int
    folder: Path
    version: Version
    root: bytes
    window_fd: int | None = None
    slots: AdapterSlots | None = None
    draft: Path | None = None
