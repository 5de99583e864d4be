"""The adapters in the slots of a seed's replica, by name: what each version changed of them."""

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from codec import Replica
from codec.adapter import CONFIG_BYTES, AdapterConfig
from codec.errors import PeerError
from codec.manifest import state_root
from codec.parts import BASE, DRAFT, Kind, Part, base_layout, part_layout
from node.coordinator.slot_configs import SlotConfigs
from node.ledger.part_history import BASE as BASE_NAME
from node.ledger.part_history import WHOLE, Change
from node.status.schema import AdapterStatus, PartsStatus

__all__ = ["AdaptersHeld"]


class AdaptersHeld:
    """`read` after each version that the replica became. A slot whose configuration cannot be read counts as empty: its
    trainer made it so, and no node serves it."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._found = SlotConfigs(lambda: replica)
        self._room, self._slots = self._found.room, self._found.slots
        self._base = base_layout(replica.layout)
        self._parts = {slot: part_layout(replica.layout, Part.adapter(slot)) for slot in self._slots}
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
            if (config := self._found.at(slot)) is None:
                self._configs.pop(slot, None)
            else:
                self._configs[slot] = config

    def status(self) -> PartsStatus | UnsetType:
        """For people and programs; `UNSET` for a model without slots."""
        if self._room is None:
            return UNSET
        hashes = self._replica.hashes
        found: list[AdapterStatus] = []
        for slot, config in sorted(self._configs.items()):
            blocks = self._parts[slot].blocks
            root = state_root(self._parts[slot].layout.hash, hashes[blocks.start : blocks.stop])
            found.append(
                AdapterStatus(
                    slot=slot,
                    name=config.name,
                    rank=max(module.rank for module in config.modules),
                    version=config.version,
                    root=root.hex(),
                    weights_bytes=self._weights_bytes(config),
                )
            )
        return PartsStatus(
            base_root=state_root(self._base.hash, hashes[: self._base.n_blocks]).hex(),
            slots=self._room.count,
            slots_free=self._room.count - len(found),
            slot_rank=self._room.rank,
            slot_bytes=CONFIG_BYTES + 2 * self._room.elements,
            adapters=found,
        )

    def _weights_bytes(self, config: AdapterConfig) -> int:
        try:
            return 2 * sum(tensor.elements for tensor in config.tensors(self._base))
        except PeerError:
            return 0  # of another base, which no node serves

    def name_of(self, part: Part) -> str:
        """The name by which the ledger knows a part: empty for the base, its draft and its formats; of an empty slot,
        one that no adapter has."""
        if part.kind is not Kind.ADAPTER:
            return BASE_NAME
        config = self._configs.get(part.slot)
        return f"~{part}" if config is None else config.name

    def change(self, parts: frozenset[Part] | None) -> Change:
        """What the replica's newest version changed, which changed `parts`. None: not known, so everything."""
        if not self._slots and (parts is None or parts <= {BASE, DRAFT}):
            return WHOLE
        parts = frozenset({BASE, *map(Part.adapter, self._slots)}) if parts is None else parts
        before = {self.name_of(part) for part in parts}
        self.read(part.slot for part in parts if part.kind is Kind.ADAPTER)
        names = before | {self.name_of(part) for part in parts}
        return Change(BASE_NAME in names, frozenset(names - {BASE_NAME}), self.adapters)
