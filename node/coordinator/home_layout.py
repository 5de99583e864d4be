"""The layout of a seed's home: that of the base checkpoint, with the parts that the home was first started with."""

from collections.abc import Iterable

from codec import Checkpoint, Layout, open_manifest
from codec.adapter import AdapterSlots
from codec.errors import UsageError
from codec.formats.share import formats_of
from codec.formats.spec import format_named, format_tensors
from codec.parts import BASE, base_layout, draft_layout, extended, parts
from codec.sign import Key
from node.settings.config import SeedConfig
from swarm.store import Store

__all__ = ["format_bytes", "layout_of"]


def layout_of(
    config: SeedConfig, store: Store, checkpoint: Checkpoint, key: Key, draft: Checkpoint | None = None
) -> Layout:
    """The layout of this home's swarm. A home keeps the parts of its first start, and later starts need not name them.

    `checkpoint`: the base. `draft`: the draft model, if the settings name one.

    Raises `UsageError` when the settings name other parts than the home has, and when the base
    cannot have the parts that they name.
    """
    base = checkpoint.layout
    if any(found.part != BASE for found in parts(base)):
        raise UsageError(
            f"{checkpoint.path} has tensors whose names are reserved for adapters, formats and draft models: rename or "
            "remove those that begin with '~'."
        )
    wanted = None
    if config.adapters:
        wanted = AdapterSlots.reserve(base, config.adapters, config.planned_adapter_rank)
    forms = tuple(sorted(config.format))
    drafted = None if draft is None else draft.layout
    newest = store.newest()
    data = None if newest is None else store.file(open_manifest(newest.manifest, key.public).layout_hash)
    if data is None:  # a new home, or one whose copy of the layout is lost
        return _extended(base, wanted, forms, drafted)
    stored = Layout.from_bytes(data)
    held = AdapterSlots.of(stored)
    if wanted is not None and wanted != held and base_layout(stored) == base:
        has = "no slots for adapters"
        if held is not None:
            has = f"{held.count} slots for adapters of rank {held.rank}"
        raise UsageError(
            f"{store.folder} was started with {has}, which cannot be changed: leave out --adapters and --adapter-rank, "
            "or start a new swarm with another home (--home)."
        )
    if base_layout(stored) != base:
        return _extended(base, wanted, forms, drafted)
    if draft is not None and drafted != (held_draft := draft_layout(stored)):
        has = (
            "without a draft model" if held_draft is None else f"with another draft model than the one in {draft.path}"
        )
        raise UsageError(
            f"{store.folder} was started {has}, which cannot be changed: leave out --draft, or start a new swarm with "
            "another home (--home)."
        )
    if forms and forms != formats_of(stored):
        raise UsageError(
            f"{store.folder} was started with {' and '.join(formats_of(stored)) or 'no formats'}, which cannot be "
            "changed: leave out --format, or start a new swarm with another home (--home)."
        )
    return stored


def format_bytes(base: Layout, names: Iterable[str]) -> int:
    """The bytes of these formats of a model. Raises `UsageError` for a model that has nothing to quantise."""
    return sum(tensor.nbytes for name in names for tensor in format_tensors(base, format_named(name)))


def _extended(base: Layout, slots: AdapterSlots | None, forms: tuple[str, ...], draft: Layout | None) -> Layout:
    """The layout of a new swarm. Raises `UsageError` for a model that has nothing to quantise."""
    return extended(
        base, slots, draft, formats=[tensor for name in forms for tensor in format_tensors(base, format_named(name))]
    )
