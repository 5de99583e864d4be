"""What a member of one format holds: the format's part, and the tensors that it leaves in bf16. Imports no numpy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from codec.errors import UsageError
from codec.formats.spec import format_named, is_quantised
from codec.layout import Layout
from codec.shards import Shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FormatShare", "Share", "fields_of", "format_prefix", "formats_of", "share_of"]


def format_prefix(name: str) -> str:
    """How the names of a format's tensors begin; of an empty `name`, those of all formats."""
    return f"~format/{name}/" if name else "~format/"


@dataclass(frozen=True, slots=True)
class FormatShare:
    """The blocks of a model that a member with the format `name` holds. Raises `UsageError` for an unknown format."""

    name: str

    def __post_init__(self) -> None:
        format_named(self.name)

    def __str__(self) -> str:
        return self.name

    def covers(self, other: object) -> bool:
        """Whether this share has every block of `other`."""
        return self == other

    def blocks(self, layout: Layout) -> "NDArray[np.bool_]":
        """For each block of the model, whether it is in this share."""
        import numpy as np  # a relay knows shares, and loads no numpy

        held = np.zeros(layout.n_blocks, np.bool_)
        prefix, form = format_prefix(self.name), format_named(self.name)
        for tensor in layout.tensors:
            mine = tensor.name.startswith(prefix) or not (tensor.name.startswith("~") or is_quantised(tensor, form))
            if mine:
                blocks = layout.blocks_of(tensor.name)
                held[blocks.start : blocks.stop] = True
        return held


Share = Shard | FormatShare
"""What a member holds that does not hold the whole model."""


def share_of(shards: int, ranks: tuple[int, ...], form: str) -> Share | None:
    """The share that a joiner asks for, or a grant names; None: the whole model.

    Raises `UsageError` for one that cannot be: ranks that do not exist, an unknown format, or both a format and ranks.
    """
    if not form:
        return Shard(shards, ranks) if shards or ranks else None
    if shards or ranks:
        raise UsageError("A member holds a format or the blocks of some ranks, not both.")
    return FormatShare(form)


def fields_of(share: Share | None) -> tuple[int, tuple[int, ...], str]:
    """The inverse of `share_of`: (shards, ranks, format), as messages have them."""
    match share:
        case Shard(shards, ranks):
            return shards, ranks, ""
        case FormatShare(name):
            return 0, (), name
        case None:
            return 0, (), ""


def formats_of(layout: Layout) -> tuple[str, ...]:
    """The names of the formats whose parts a model has, ascending."""
    prefix = format_prefix("")
    names = {
        tensor.name.removeprefix(prefix).partition("/")[0]
        for tensor in layout.tensors
        if tensor.name.startswith(prefix)
    }
    return tuple(sorted(names))
