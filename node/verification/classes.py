"""Arithmetic classes: engines of one class round alike, as far as their makers keep to it."""

from collections.abc import Iterable
from typing import Final

import msgspec

__all__ = ["KEEPS_KEYS", "ArithmeticClass", "ClassPair", "in_format", "names_class"]

PREFIX: Final = "class:"
_MOST_CHARACTERS: Final = 64
"""Of the name of an ability, as messages have it."""
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
    """In which the model computes, as "bfloat16"; the name of a format where the weights stand for its codes."""
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
    return frozenset(_label_in(name, form) if name.startswith(PREFIX) else name for name in abilities)


def _label_in(name: str, form: str) -> str:
    """The label of a class with `form` as its dtype; the device's name is cut, before its fingerprint, to fit."""
    parts = name.split("/", 4)
    if len(parts) < 5:
        return name
    parts[3] = form
    device, dash, fingerprint = parts[2].rpartition("-")
    parts[2] = device[: max(0, len(device) - max(0, len("/".join(parts)) - _MOST_CHARACTERS))] + dash + fingerprint
    return "/".join(parts)[:_MOST_CHARACTERS]
