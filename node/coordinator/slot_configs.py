"""What the configurations in the slots of a seed's replica say."""

from collections.abc import Callable

from codec import Replica
from codec.adapter import AdapterConfig, AdapterSlots
from codec.errors import SwarmError

__all__ = ["SlotConfigs"]


class SlotConfigs:
    """Of one seed. `replica()`: its bits at present. A configuration is decoded once for each hash of its block."""

    def __init__(self, replica: Callable[[], Replica]) -> None:
        self._replica = replica
        self.room = AdapterSlots.of(replica().layout)
        """None: the model has no slots."""
        self._known: dict[int, tuple[bytes, AdapterConfig | None]] = {}

    @property
    def slots(self) -> range:
        """The numbers of the slots."""
        return range(0 if self.room is None else self.room.count)

    def at(self, slot: int) -> AdapterConfig | None:
        """What the slot says; None for an empty one, and for bytes that are no configuration: its trainer made them,
        and no node serves them."""
        replica, block = self._replica(), self._block(slot)
        digest = replica.hashes[block].tobytes()
        if self._known.get(slot, (b"", None))[0] != digest:
            try:
                config = AdapterConfig.from_bytes(replica.read_block(block))
            except SwarmError:
                config = None
            self._known[slot] = digest, config
        return self._known[slot][1]

    def is_empty(self, slot: int) -> bool:
        """Whether the slot's configuration is zeros."""
        return self.at(slot) is None and not any(self._replica().read_block(self._block(slot)))

    def _block(self, slot: int) -> int:
        return self._replica().layout.blocks_of(f"~adapter/{slot:02}/config").start
