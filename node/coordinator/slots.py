"""Which adapter has which slot: found by its name, or a free one taken for a new name.

The slots of published adapters are in the replica. A name that was never published has a reservation, which is durable
before its trainer hears of the slot, so that a restarted seed gives the trainer the same one. A reservation without a
trainer is given up when another name needs the slot.
"""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from codec import Replica
from codec.adapter import MAX_SLOTS, is_adapter_name
from codec.errors import UsageError
from codec.parts import Part
from node.coordinator.slot_configs import SlotConfigs
from node.trainers.adapter_messages import AdapterRow, Adapters
from swarm.runtime import in_thread

__all__ = ["SlotRecords", "Slots"]

_RESERVED: Final = "adapter-slot/"
"""Records of reservations: `adapter-slot/NAME`, whose value is the slot's number in decimal."""


class SlotRecords(Protocol):
    """Durable records, as in `swarm.store`."""

    def put(self, records: Iterable[tuple[str, bytes]], *, drop: Iterable[str] = ()) -> None: ...

    def all(self, prefix: str = "") -> dict[str, bytes]: ...


class Slots:
    """The slots of one seed. `replica()`: its bits at present."""

    def __init__(self, replica: Callable[[], Replica], records: SlotRecords) -> None:
        self._records = records
        self._configs = SlotConfigs(replica)
        self._count, self._rank = len(self._configs.slots), self._configs.room.rank if self._configs.room else 0
        self._attached: dict[str, Part] = {}

    def adapters(self) -> dict[str, Part]:
        """The published adapters, by name."""
        return {config.name: Part.adapter(slot) for slot in self._configs.slots if (config := self._configs.at(slot))}

    def report(self) -> Adapters:
        """The published adapters, for people and programs."""
        rows = []
        for slot in self._configs.slots:
            if (config := self._configs.at(slot)) is not None:
                rank = max(module.rank for module in config.modules)
                attached = self.is_attached(config.name)
                rows.append(AdapterRow(config.name, slot, config.version, rank, len(config.modules), attached))
        return Adapters(tuple(rows), self._count, self._rank)

    def is_attached(self, name: str) -> bool:
        """Whether a trainer is attached to this adapter."""
        return name in self._attached

    async def attach(self, name: str) -> Part:
        """The slot of the adapter `name` for a trainer, which must `detach` it.

        The caller must have found that no other trainer is attached to it. Raises `UsageError` when the name is
        impossible, or no slot is free.
        """
        if not is_adapter_name(name):
            raise UsageError(
                f"adapter={name[:80]!r}: an adapter's name has 1 to 64 of the characters A-Z a-z 0-9 . _ -"
            )
        if not self._count:
            raise UsageError(
                "This swarm has no room for adapters. Start one that has, in a new home: swarm-node seed --base FOLDER "
                "--adapters 8 --adapter-rank 16. Or publish the model merged, with publish(model) and without adapter=."
            )
        published = self.adapters()
        reserved = self._reserved(published)
        if (part := published.get(name) or reserved.get(name)) is not None:
            self._attached[name] = part
            return part
        part, instead_of = self._free(published, reserved)
        self._attached[name] = part  # before anything is awaited: two names may be new at once
        try:
            await in_thread(self._reserve, name, part, instead_of)
        except BaseException:
            del self._attached[name]
            raise
        return part

    def detach(self, name: str) -> None:
        """The trainer of this adapter has ended. Its slot stays reserved."""
        self._attached.pop(name, None)

    async def forget(self, name: str) -> None:
        """The adapter is not published any more: give its reservation up."""
        await in_thread(self._drop, name)

    def _drop(self, name: str) -> None:
        self._records.put([], drop=[_RESERVED + name])

    def _reserve(self, name: str, part: Part, instead_of: str | None) -> None:
        drop = [] if instead_of is None else [_RESERVED + instead_of]
        self._records.put([(_RESERVED + name, str(part.slot).encode())], drop=drop)

    def _reserved(self, published: dict[str, Part]) -> dict[str, Part]:
        """The reservations whose slots no published adapter has: after a return to an older version, one may."""
        taken = set(published.values())
        found: dict[str, Part] = {}
        for record, value in self._records.all(_RESERVED).items():
            name = record.removeprefix(_RESERVED)
            if name not in published and int(value) < self._count and (part := Part.adapter(int(value))) not in taken:
                found[name] = part
        return found

    def _free(self, published: dict[str, Part], reserved: dict[str, Part]) -> tuple[Part, str | None]:
        """A slot for a new name, and the name whose reservation is given up for it. Raises `UsageError`."""
        used = {*published.values(), *self._attached.values()} | {
            Part.adapter(slot) for slot in self._configs.slots if not self._configs.is_empty(slot)
        }
        free = [part for slot in self._configs.slots if (part := Part.adapter(slot)) not in used]
        for part in free:
            if part not in reserved.values():
                return part, None
        for part in free:
            return part, next(name for name, other in reserved.items() if other == part)
        names = ", ".join(sorted(published)[:8]) + (", ..." if len(published) > 8 else "")
        remedy = "Remove one (swarm-node remove-adapter NAME)"
        if self._count < MAX_SLOTS:
            remedy += f", or start a new swarm with more of them (--adapters; at most {MAX_SLOTS})"
        raise UsageError(f"All {self._count} slots for adapters are in use ({names}). {remedy}.")
