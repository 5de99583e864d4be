"""Publishes one adapter: a publish line whose versions are the two tensors of the adapter's slot."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from codec.adapter import CONFIG_BYTES, AdapterSlots, linear_layers
from codec.errors import UsageError
from node.trainers.attach import Attachment
from node.trainers.connection.link import Link
from node.trainers.publish.entries import Entry
from node.trainers.publish.line import OnBusy, PublishLine
from node.trainers.publish.publication import Holders, Publication
from node.trainers.tensors.adapter_slot import fill_slot, slot_config
from node.trainers.tensors.naming import Naming
from node.trainers.tensors.own_base import check_base
from node.trainers.tensors.plain_lora import plain_lora

__all__ = ["AdapterLine"]

_VERSION: Final = slice(4, 12)
"""Bytes of the configuration tensor that hold the adapter's own version, u64 little endian; see `codec.adapter`."""


class AdapterLine:
    """As `node.trainers.publish.line.PublishLine`, for one adapter. `line`: waits, closes and tells the head."""

    def __init__(self, attachment: Attachment, threads: int, holders: Callable[[Publication, float], Holders]) -> None:
        """`attachment`: by `node.trainers.attach.attach_adapter`. For the others see `PublishLine`."""
        base = attachment.link.base
        assert base is not None, "attached to an adapter"
        self.name = attachment.rank_info.adapter
        self._base, self._naming, self._sample = base, Naming(base), attachment.link.base_sample
        self._config, self._weights = attachment.link.replica.layout.tensors
        elements = self._weights.elements
        width = sum(sum(shape) for shape in linear_layers(base).values())
        self._slots = AdapterSlots(1, elements // width, elements)
        self._bits = np.zeros(CONFIG_BYTES, np.uint8), np.zeros(elements, np.uint16)
        self.line = PublishLine(attachment, threads, holders, prepare=self._count)

    def publish(self, source: Any, step: int, on_busy: OnBusy, timeout_s: float) -> Publication:
        """Copy the adapter in `source` and queue it; see `Swarm.publish`. Raises `UsageError` for what does not fit."""
        adapter = plain_lora(source, self.name, self._naming.checkpoint_name)
        if self._sample:  # a trainer does not change its base while it runs, so its first version tells
            check_base(self.name, source, adapter.peft, self._sample, self._base, self._naming.checkpoint_name)
            self._sample = b""
        config = slot_config(adapter, self.name, self._base, self._slots)
        fill_slot(adapter, config, *self._bits)
        tensors = dict(zip((self._config.name, self._weights.name), self._bits, strict=True))
        elements = sum(m.a.size + m.b.size for m in adapter.modules) + int(np.flatnonzero(self._bits[0])[-1]) + 1
        publication = self.line.publish(tensors, step, on_busy, timeout_s, elements=elements)
        publication.adapter = self.name
        return publication

    def _count(self, entry: Entry, link: Link, bytes_of: Callable[[str], Any]) -> None:
        """Write the adapter's own version, one more than that of the parent, into the copy of its configuration."""
        version = int.from_bytes(link.replica.block(0)[_VERSION].tobytes(), "little") + 1
        if version >> 64:
            raise UsageError(f"The adapter {self.name!r} has had all 2^64 versions: remove it first.")
        bytes_of(self._config.name)[_VERSION] = np.frombuffer(version.to_bytes(8, "little"), np.uint8)
        entry.publication.adapter_version = version
