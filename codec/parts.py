"""The parts of a layout: the base model, a draft model, slots of adapters, and stored formats of the base.

A layout is one list of tensors, and a version has one root over all blocks. Parts divide it by the tensors' names:

| part | tensors |
|---|---|
| base | the checkpoint's own names |
| draft | `~_draft/NAME` for each tensor of the draft model's checkpoint |
| adapter slot i, 0 to 63 | `~adapter/07/config` U8 (65536,), `~adapter/07/weights` BF16 (E,) |
| format F | `~format/F/NAME/codes` and others: the format's bytes of the base's tensor NAME |

`~` sorts after all ASCII letters, so the base's tensors come first: the layout of the base alone has the same offsets
and the same block numbers. `_` sorts before all small letters, so the draft comes next: the base with its draft, which
one trainer publishes and one engine loads, is a prefix of the layout too. A layout without other parts is its own base.
Each part is a run of tensors, so it is a run of blocks too.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Final

from codec.adapter import MAX_SLOTS, AdapterSlots, slot_tensors
from codec.errors import PeerError, UsageError
from codec.layout import FileSpec, Layout, TensorSpec
from codec.manifest import state_root

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BASE",
    "DRAFT",
    "DRAFT_FILE",
    "Kind",
    "Part",
    "PartBlocks",
    "PartRange",
    "base_layout",
    "changed_parts",
    "draft_blocks",
    "draft_files",
    "draft_layout",
    "draft_name",
    "extended",
    "part_classes",
    "part_layout",
    "part_of",
    "part_root",
    "parts",
    "policy_base",
    "policy_part",
]

MARK: Final = "~"
"""The first character of the name of each tensor that is not the base's."""
DRAFT_FILE: Final = "~draft~"
"""The small files of the draft model are in the layout under their names after this prefix."""

_SLOT: Final = re.compile(r"~adapter/(\d\d)/(?:config|weights)")
_DRAFT_TENSOR: Final = "~_draft/"
_FORMAT: Final = re.compile(r"~format/([A-Za-z0-9._-]{1,64})/.+/[a-z_]+")


class Kind(Enum):
    """What a part is."""

    BASE = "base"
    DRAFT = "draft"
    ADAPTER = "adapter"
    FORMAT = "format"


_ORDER: Final = {kind: number for number, kind in enumerate(Kind)}
"""The order of the parts in a layout: that of their tensors' names."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a layout. `name`: of an adapter slot, its number with two digits; of a format, its name; else empty.

    `str(part)` is `base`, `adapter/07`, `draft` or `format/NAME`; `parse` is the inverse.
    """

    kind: Kind
    name: str = ""

    @classmethod
    def adapter(cls, slot: int) -> "Part":
        """The part of an adapter's slot. Raises `UsageError` for a number beyond 0 to 63."""
        if not 0 <= slot < MAX_SLOTS:
            raise UsageError(f"Slots of adapters have the numbers 0 to {MAX_SLOTS - 1}, so there is no slot {slot}.")
        return cls(Kind.ADAPTER, f"{slot:02}")

    @classmethod
    def parse(cls, text: str) -> "Part":
        """The part with this text form. Raises `PeerError`."""
        kind, _, name = text.partition("/")
        if text in (Kind.BASE.value, Kind.DRAFT.value):
            return cls(Kind(text))
        if kind == Kind.ADAPTER.value and re.fullmatch(r"[0-9]{2}", name) and int(name) < MAX_SLOTS:
            return cls(Kind.ADAPTER, name)
        if kind == Kind.FORMAT.value and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            return cls(Kind.FORMAT, name)
        raise PeerError(f"part: {text[:80]!r} names none")

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.name}" if self.name else self.kind.value

    @property
    def slot(self) -> int:
        """The number of an adapter's slot; only for `Kind.ADAPTER`."""
        assert self.kind is Kind.ADAPTER
        return int(self.name)

    @property
    def order(self) -> tuple[int, str]:
        """Parts sorted by this key have the order that they have in a layout."""
        return _ORDER[self.kind], self.name


BASE: Final = Part(Kind.BASE)
DRAFT: Final = Part(Kind.DRAFT)


@dataclass(frozen=True, slots=True)
class PartRange:
    """Where a part lies in a layout. `tensors`: indices of its tensors. `blocks`: ids of its blocks."""

    part: Part
    tensors: range
    blocks: range


@dataclass(frozen=True)
class PartBlocks:
    """A part as a layout of its own, whose blocks are numbered from 0.

    `first`: the id, in the whole layout, of its block 0. `offset`: of its first byte in a buffer of the whole layout.
    """

    part: Part
    layout: Layout
    first: int
    offset: int

    @property
    def blocks(self) -> range:
        """The ids of its blocks in the whole layout."""
        return range(self.first, self.first + self.layout.n_blocks)


def part_of(name: str) -> Part:
    """The part to which a tensor of this name belongs. A name that no other part uses is the base's."""
    if not name.startswith(MARK):
        return BASE
    if (match := _SLOT.fullmatch(name)) and int(match[1]) < MAX_SLOTS and match[1].isascii():
        return Part(Kind.ADAPTER, match[1])
    if name.startswith(_DRAFT_TENSOR) and name != _DRAFT_TENSOR:
        return DRAFT
    if match := _FORMAT.fullmatch(name):
        return Part(Kind.FORMAT, match[1])
    return BASE


def parts(layout: Layout) -> tuple[PartRange, ...]:
    """The parts of a layout, in order; the base is the first, also when it has no tensor.

    Raises `PeerError` if a part's tensors do not follow one another.
    """
    found: list[PartRange] = []
    at = block = 0
    for part, tensors in groupby(layout.tensors, key=lambda tensor: part_of(tensor.name)):
        first, first_block = at, block
        for tensor in tensors:
            at += 1
            block += tensor.n_blocks
        if not found and part != BASE:
            found.append(PartRange(BASE, range(0), range(0)))
        if found and part.order <= found[-1].part.order:
            raise PeerError(f"layout.tensors: {layout.tensors[first].name!r} does not follow the others of its part")
        found.append(PartRange(part, range(first, at), range(first_block, block)))
    return tuple(found) or (PartRange(BASE, range(0), range(0)),)


def part_layout(layout: Layout, part: Part) -> PartBlocks:
    """A part as a layout of its own. The base has the small files of the base model, and the draft those of the draft,
    under the names that they have in `layout`. Raises `PeerError` if the layout does not have the part."""
    ranges = parts(layout)
    for found in ranges:
        if found.part == part:
            break
    else:
        raise PeerError(f"part: this model has no {part}")
    if len(ranges) == 1:
        return PartBlocks(part, layout, 0, 0)
    tensors = layout.tensors[found.tensors.start : found.tensors.stop]
    sub = Layout(tensors, tuple(file for file in layout.files if _part_of_file(file) == part))
    return PartBlocks(part, sub, found.blocks.start, layout.offset(tensors[0].name) if tensors else 0)


def base_layout(layout: Layout) -> Layout:
    """The layout of the base alone: the first tensors, with the same offsets and block ids, and the base's files."""
    return part_layout(layout, BASE).layout


def policy_part(layout: Layout) -> PartBlocks:
    """The base with its draft, if it has one, as a layout of its own: what one trainer publishes as one version.

    It is a prefix of the whole: the same offsets and block ids, with the small files of both. Without a draft it is the
    base's part.
    """
    ranges = parts(layout)
    if len(ranges) == 1 or ranges[1].part != DRAFT:
        return part_layout(layout, BASE)
    if len(ranges) == 2:
        return PartBlocks(BASE, layout, 0, 0)
    return PartBlocks(BASE, Layout(layout.tensors[: ranges[1].tensors.stop], layout.files), 0, 0)


def policy_base(layout: Layout) -> Layout:
    """`layout` without its draft model; itself if it has none. `layout`: one part's, or that of `policy_part`."""
    return base_layout(layout) if draft_blocks(layout) else layout


def draft_name(name: str) -> str:
    """The name, in the whole layout, of a tensor of the draft model's checkpoint."""
    return _DRAFT_TENSOR + name


def draft_layout(layout: Layout) -> Layout | None:
    """The draft model's own layout: tensors and files under the names of its checkpoint. None: there is no draft."""
    if not any(found.part == DRAFT for found in parts(layout)):
        return None
    own = part_layout(layout, DRAFT).layout
    tensors = (
        TensorSpec(_own(spec.name), spec.dtype, spec.shape, tuple(_own(alias) for alias in spec.aliases))
        for spec in own.tensors
    )
    files = (FileSpec(file.name.removeprefix(DRAFT_FILE), file.size, file.hash) for file in own.files)
    return Layout(tuple(tensors), tuple(files))


def draft_blocks(layout: Layout) -> range:
    """The ids of the draft model's blocks; empty for a model without one."""
    return next((found.blocks for found in parts(layout) if found.part == DRAFT), range(0))


def draft_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The small files of a draft model's checkpoint under the names that they have in the whole layout."""
    return {DRAFT_FILE + name: data for name, data in files.items()}


def _own(name: str) -> str:
    return name.removeprefix(_DRAFT_TENSOR)


def part_root(layout: Layout, hashes: "NDArray[np.uint8]", part: Part) -> bytes:
    """The root (32 bytes) of one part: `state_root` of its own layout and its blocks' hashes.

    The layout's hash, which covers the tensors' names, keeps the roots of two slots apart, and the root of the base of
    a layout without other parts is the root of the whole. `hashes`: uint8 (n_blocks, 32) of the whole layout. Raises
    `PeerError` if the layout does not have the part.
    """
    own = part_layout(layout, part)
    return state_root(own.layout.hash, hashes[own.first : own.first + own.layout.n_blocks])


def changed_parts(ranges: Sequence[PartRange], blocks: Iterable[int]) -> frozenset[Part]:
    """The parts that have any of these blocks. `ranges`: of a layout (`parts`). `blocks`: ids in it. Raises `PeerError`
    for an id beyond it."""
    starts = [found.blocks.start for found in ranges]
    changed: set[Part] = set()
    for block in blocks:
        found = ranges[bisect_right(starts, block) - 1]
        if block not in found.blocks:
            raise PeerError(f"block: {block} of {ranges[-1].blocks.stop}")
        changed.add(found.part)
    return frozenset(changed)


def part_classes(layout: Layout, base_classes: Sequence[int] | None = None) -> Sequence[int] | None:
    """For each block its class, for `codec.pack.ClassPacker`: no chunk has blocks of two parts.

    `base_classes`: the classes, 0 or larger, into which the base's blocks are divided (`codec.shards.block_ranks`);
    None: the base is one class. None for a layout that is one class. Every other part is a class of its own.
    """
    ranges = parts(layout)
    if len(ranges) == 1:
        return base_classes
    base = len(ranges[0].blocks)
    classes = list(base_classes[:base]) if base_classes is not None else [0] * base
    for number, found in enumerate(ranges[1:], 1):
        classes += [-number] * len(found.blocks)
    return classes


def extended(
    base: Layout,
    adapters: AdapterSlots | None = None,
    draft: Layout | None = None,
    formats: Iterable[TensorSpec] = (),
) -> Layout:
    """The layout of a base model with further parts. Without any, `base` itself.

    `formats`: the tensors of stored formats, under their names in the whole layout. Raises `UsageError` if names of the
    base, or of the draft, leave no room for the others.
    """
    formats = tuple(formats)
    if adapters is None and draft is None and not formats:
        return base
    names = [name for tensor in base.tensors for name in (tensor.name, *tensor.aliases)]
    for name in (*names, *(file.name for file in base.files)):
        if name >= MARK:
            raise UsageError(
                f"The model has a tensor or file {name[:80]!r}. With adapters, formats or a draft model, all "
                "names must sort before '~': rename it in the model's folder."
            )
    tensors, files = list(base.tensors), list(base.files)
    if adapters is not None:
        tensors += (tensor for slot in range(adapters.count) for tensor in slot_tensors(slot, adapters.elements))
    if draft is not None:
        tensors += (
            TensorSpec(
                draft_name(tensor.name), tensor.dtype, tensor.shape, tuple(draft_name(name) for name in tensor.aliases)
            )
            for tensor in draft.tensors
        )
        files += (FileSpec(DRAFT_FILE + file.name, file.size, file.hash) for file in draft.files)
    for tensor in formats:
        assert part_of(tensor.name).kind is Kind.FORMAT, f"{tensor.name} is not a name of a format's tensor"
    tensors += formats
    tensors.sort(key=lambda tensor: tensor.name)
    files.sort(key=lambda file: file.name)
    try:
        return Layout(tuple(tensors), tuple(files))
    except PeerError as error:
        raise UsageError(f"The model cannot have these parts: {error}.") from error


def _part_of_file(file: FileSpec) -> Part:
    return DRAFT if file.name.startswith(DRAFT_FILE) else BASE
