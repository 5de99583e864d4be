"""The adapters in the slots of a seed's replica, by name: what each version changed of them."""

from collections.abc import Iterable

from codec import Replica
from codec.adapter import AdapterConfig, AdapterSlots
from codec.errors import PeerError
from codec.parts import BASE, Kind, Part
from node.ledger.part_history import BASE as BASE_NAME
from node.ledger.part_history import WHOLE, Change

__all__ = ["AdaptersHeld"]


class AdaptersHeld:
    """`read` after each version that the replica became. A slot whose configuration cannot be read counts as empty: its
    trainer made it so, and no node serves it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        slots = AdapterSlots.of(replica.layout)
        self._slots = range(0 if slots is None else slots.count)
        self._configs: dict[int, AdapterConfig] = {}
        self.read(self._slots)

    @property
    def adapters(self) -> dict[str, int]:
        """By name: each adapter's own version. Of two slots with one name, the first counts."""
        found: dict[str, int] = {}
        for _, config in sorted(self._configs.items()):
            found.setdefault(config.name, config.version)
        return found

    def read(self, slots: Iterable[int]) -> None:
        """Read these slots of the replica anew."""
        for slot in slots:
            try:
                block = self._replica.layout.blocks_of(f"~adapter/{slot:02}/config").start
                config = AdapterConfig.from_bytes(self._replica.read_block(block))
            except PeerError:
                config = None
            if config is None:
                self._configs.pop(slot, None)
            else:
                self._configs[slot] = config

    def name_of(self, part: Part) -> str:
        """The name by which the ledger knows a part: empty for the base and its formats; of a draft or an empty slot,
        one that no adapter has."""
        if part.kind is Kind.DRAFT:
            return f"~{part}"
        if part.kind is not Kind.ADAPTER:
            return BASE_NAME
        config = self._configs.get(part.slot)
        return f"~{part}" if config is None else config.name

    def change(self, parts: frozenset[Part] | None) -> Change:
        """What the replica's newest version changed, which changed `parts`. None: not known, so everything."""
        if not self._slots and (parts is None or parts <= {BASE}):
            return WHOLE
        parts = frozenset({BASE, *map(Part.adapter, self._slots)}) if parts is None else parts
        before = {self.name_of(part) for part in parts}
        self.read(part.slot for part in parts if part.kind is Kind.ADAPTER)
        names = before | {self.name_of(part) for part in parts}
        return Change(BASE_NAME in names, frozenset(names - {BASE_NAME}), self.adapters)
