"""Arithmetic classes: engines of one class round alike, as far as their makers keep to it."""

from collections.abc import Iterable
from typing import Final

import msgspec

__all__ = ["KEEPS_KEYS", "ArithmeticClass", "ClassPair", "in_format", "names_class"]

PREFIX: Final = "class:"
KEEPS_KEYS: Final = "kept-"
"""Before the attention: at a commit, running sequences keep keys and values that older versions computed."""


class ArithmeticClass(msgspec.Struct, frozen=True, order=True):
    """Everything that decides how an engine rounds. The noise between two classes is learned for each pair."""

    engine: str
    """As "transformers" or "vllm"."""
    engine_version: str
    device: str
    """As "cpu" or "NVIDIA H100". CPUs of different vector width may round otherwise; only measurement tells."""
    dtype: str
    """In which the model computes, as "bfloat16"; "bfloat16 of int4-group-e8" where weights stand for codes."""
    attention: str
    """The attention backend, as "sdpa"."""
    parallelism: int = 1
    """Ranks of tensor parallelism: sums over ranks are rounded in another order."""

    @property
    def name(self) -> str:
        """A label for tables and logs."""
        parts = (self.engine, self.engine_version, self.device, self.dtype, self.attention, f"tp{self.parallelism}")
        return "/".join(parts)

    @property
    def keeps_keys(self) -> bool:
        """Whether nobody can compute a sample's tokens after a commit, because keys of older versions decide them."""
        return self.attention.startswith(KEEPS_KEYS)

    @classmethod
    def named(cls, abilities: Iterable[str], kind: str) -> "ArithmeticClass":
        """The class that a node's abilities name: "class:" and the label. One that names none is of the class of its
        engine's kind.

        A node may lie about its class: it is then compared with others of that class, or with nobody.
        """
        label = next((name.removeprefix(PREFIX) for name in sorted(abilities) if name.startswith(PREFIX)), kind)
        engine, version, device, dtype, last, *_ = [*label.split("/", 4), "", "", "", ""]
        attention, _, ranks = last.rpartition("/tp")
        if attention and ranks.isdecimal() and len(ranks) < 5:
            return cls(engine, version, device, dtype, attention, int(ranks))
        return cls(engine, version, device, dtype, last)


ClassPair = tuple[ArithmeticClass, ArithmeticClass]
"""(the author's class, the checker's class): drawing rounds otherwise than scoring, so the order counts."""


def names_class(abilities: Iterable[str]) -> bool:
    """Whether a node says in which class its engine is."""
    return any(name.startswith(PREFIX) for name in abilities)


def in_format(abilities: frozenset[str], form: str) -> frozenset[str]:
    """Abilities of an engine whose weights stand for the codes of a format: its class is another than that of engines
    with the base's weights, so the noise between them is learned for themselves. `form` empty: `abilities`."""
    if not form:
        return abilities
    found: set[str] = set()
    for name in abilities:
        parts = name.split("/", 4)
        if name.startswith(PREFIX) and len(parts) > 3:
            parts[3] = f"{parts[3]} of {form}"
        found.add("/".join(parts))
    return frozenset(found)
