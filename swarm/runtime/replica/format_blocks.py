"""Blocks of formats that this member does not hold: computed from the bits that it holds, for members that lack them.

A computed block counts only if it has the hash that the authority signed for it, so nothing that happens meanwhile (a
version that is being written, a wrong bit) can give a wrong block. One block is computed at a time, and the last ones
are kept, so members that join together cost one computation.
"""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from codec import Layered, Layout, Replica
from codec.formats.share import format_prefix
from codec.formats.spec import FORMATS
from codec.staging import block_hash
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.model import Model

if TYPE_CHECKING:
    from codec.formats.part import FormatPart

__all__ = ["FormatBlocks"]

_KEPT: Final = 16
"""Computed blocks that are kept: 16 MiB, 64 MiB if all hold float scales."""


class FormatBlocks:
    """Reads blocks of a model: those that it holds, and those of formats. Called from worker threads."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._parts: dict[tuple[bytes, str], FormatPart] = {}
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        """By hash."""

    def read_block(self, block: int) -> tuple[VersionId, bytes] | None:
        """A block and its version; None when there is no such block, none of a proven version, or it can be neither
        read nor computed."""
        found = self._model.read_block(block)
        replica, version = self._model.replica, self._model.version
        if found is not None or replica is None or version is None or not 0 <= block < replica.layout.n_blocks:
            return found
        name = replica.layout.block(block).name
        form = name.removeprefix(format_prefix("")).partition("/")[0] if name.startswith(format_prefix("")) else ""
        if form not in FORMATS or self._model.holding.shard is not None:
            return None
        digest = replica.hashes[block].tobytes()
        with self._lock:
            data = self._kept.get(digest)
            if data is None:
                data = self._compute(replica, form, block, digest)
        return None if data is None or self._model.version != version else (version, data)

    def _compute(self, replica: Replica | Layered, form: str, block: int, digest: bytes) -> bytes | None:
        from codec.formats.part import reader_of  # loads the compiler, which a member without such requests needs not

        bits = self._part(replica.layout, form).block(block, reader_of(replica))
        if block_hash(bits) != digest:
            return None
        data = bits.view(np.uint8).tobytes()
        self._kept[digest] = data
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return data

    def _part(self, layout: Layout, form: str) -> "FormatPart":
        from codec.formats.part import FormatPart

        key = layout.hash, form
        if key not in self._parts:
            self._parts[key] = FormatPart(layout, FORMATS[form])
        return self._parts[key]
