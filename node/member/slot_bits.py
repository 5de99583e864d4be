"""The bits of adapter slots, copied out of a node's replica for its engines.

A copy is of the version that the engine is to follow, or there is none: when a later version has changed the slot
meanwhile, that version's own copy follows.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from codec import Layered, Layout, Replica, shared
from codec.adapter import AdapterConfig, AdapterSlots
from codec.errors import PeerError
from codec.manifest import state_root
from codec.parts import BASE, Part, PartBlocks, part_layout
from codec.zeros import are_zeros
from node.ledger.part_history import Change
from node.member.engine_updater import AdapterUpdate

__all__ = ["SlotBits"]


class SlotBits:
    """The slots of one model. `configs`: of the adapters in them, as last copied."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.slots = AdapterSlots.of(layout)
        self._parts: dict[int, PartBlocks] = {}
        self.configs: dict[int, AdapterConfig] = {}

    @property
    def all(self) -> range:
        """The numbers of all slots."""
        return range(0 if self.slots is None else self.slots.count)

    def copy(self, replica: Replica | Layered, slots: Iterable[int], hashes: NDArray[np.uint8]) -> list[AdapterUpdate]:
        """Copies of these slots. `hashes`: uint8 (n_blocks, 32), of all blocks in the version that is wanted; slots in
        which the replica differs are left out. No version may be written meanwhile. Raises `UsageError` if there is too
        little memory."""
        found: list[AdapterUpdate] = []
        for slot in slots:
            blocks = self._part(slot).blocks
            wanted = hashes[blocks.start : blocks.stop]
            if np.array_equal(replica.hashes[blocks.start : blocks.stop], wanted):
                found.append(self._copy(replica, slot, state_root(self._part(slot).layout.hash, wanted)))
        return found

    def change(self, parts: frozenset[Part], copies: Iterable[AdapterUpdate]) -> Change:
        """What a version changed: these parts, and of the adapters what `copies` say."""
        names: set[str] = set()
        for update in copies:
            before = self.configs.pop(update.slot, None)
            if update.config is not None:
                self.configs[update.slot] = update.config
            names |= {config.name for config in (before, update.config) if config is not None}
        own: dict[str, int] = {}
        for _, config in sorted(self.configs.items()):
            own.setdefault(config.name, config.version)
        return Change(BASE in parts, frozenset(names), own)

    def _part(self, slot: int) -> PartBlocks:
        if slot not in self._parts:
            self._parts[slot] = part_layout(self._layout, Part.adapter(slot))
        return self._parts[slot]

    def _copy(self, replica: Replica | Layered, slot: int, root: bytes) -> AdapterUpdate:
        blocks = self._part(slot).blocks
        try:
            config = AdapterConfig.from_bytes(replica.read_block(blocks.start))
        except PeerError:
            config = None  # its trainer made it so; the seed counts it as empty, too
        if config is None:
            return AdapterUpdate(slot)
        assert self.slots is not None
        fd, memory = shared.reserve("swarm-adapter", 2 * self.slots.elements)
        if fd is None:
            raise shared.no_sharing()
        at = 0
        for block in blocks[1:]:
            nbytes = self._layout.block(block).nbytes
            if not are_zeros(self._layout, block, replica.hashes[block].tobytes()):
                memory[at : at + nbytes] = replica.read_block(block)
            at += nbytes
        memory.close()
        shared.seal_forever(fd)
        return AdapterUpdate(slot, config, fd, root)
