"""The draft model of a seed: the checkpoint that it begins with, and what `status` says of it."""

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from codec import Checkpoint, Replica, state_root
from codec.errors import UsageError
from codec.parts import DRAFT, Part, draft_blocks, draft_name, part_layout
from codec.staging import block_hash
from node.status.schema import DraftStatus

__all__ = ["DraftHeld", "load_draft", "open_draft"]

_CONFIG: Final = "config.json"


def open_draft(folder: Path, base: Checkpoint) -> Checkpoint:
    """The checkpoint of a draft model for `base`. Raises `UsageError` for a folder without one, for one without
    `config.json`, and for a model of another vocabulary."""
    checkpoint = Checkpoint.open(folder)
    files = checkpoint.files
    if _CONFIG not in files:
        raise UsageError(f"{folder} has no {_CONFIG}, by which engines build the draft model: give its whole folder.")
    own, wanted = _vocabulary(files[_CONFIG]), _vocabulary(base.files.get(_CONFIG, b""))
    if own != wanted and wanted:
        raise UsageError(
            f"The draft model in {folder} has a vocabulary of {own:,} tokens and the base one of {wanted:,}: give a "
            "draft that was made for this base (--draft)."
        )
    return checkpoint


def _vocabulary(config: bytes) -> int:
    """Tokens of the model with this configuration; 0: it does not say."""
    try:
        values: Any = msgspec.json.decode(config)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return 0
    for level in (values, values.get("text_config") if isinstance(values, dict) else None):
        if isinstance(level, dict) and isinstance(size := level.get("vocab_size"), int):
            return size
    return 0


def load_draft(replica: Replica, draft: Checkpoint) -> None:
    """Write the draft model's bits into a replica whose layout has it."""
    layout = replica.layout
    for spec in draft.layout.tensors:
        bits = draft.bits(spec.name)
        for block in layout.blocks_of(draft_name(spec.name)):
            place = layout.block(block)
            new = np.ascontiguousarray(bits[place.start : place.start + place.count])
            replica.write_block(block, new.tobytes(), block_hash(new))


class DraftHeld:
    """The draft model in a seed's replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._part = part_layout(replica.layout, DRAFT) if draft_blocks(replica.layout) else None
        self._versions = 0

    def note(self, parts: frozenset[Part]) -> None:
        """A version was sealed, which changed these parts."""
        self._versions += DRAFT in parts

    def status(self) -> DraftStatus | UnsetType:
        """For people and programs; `UNSET` for a model without a draft."""
        if self._part is None:
            return UNSET
        blocks, layout = self._part.blocks, self._part.layout
        root = state_root(layout.hash, self._replica.hashes[blocks.start : blocks.stop])
        return DraftStatus(root=root.hex(), versions=self._versions, weights_bytes=layout.nbytes)
