"""What a session's key stands for: a key names one batch of work for ever, so that asking again goes on with it.

Asked with anything else that decides what is drawn, it would hand old samples out under new prompts. So the first use
of a key is kept, durably, and another under it is refused with both named.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from blake3 import blake3

from codec.errors import UsageError
from node.engines.base import SamplingParams

__all__ = ["KEPT", "Binding", "KeyTaken", "refuse", "work_pairs"]

KEPT: Final = 1 << 14
"""Bindings remembered, the newest: one a step makes this many steps."""


Pair = tuple[str, object, object]
"""A name, the value that the key is bound to, the value that is asked now."""


class KeyTaken(UsageError):
    """The key stands for other work."""


class Binding(NamedTuple):
    """`prompts`: hash of all `prompt_count` of them; empty where they were not known beforehand (an iterator)."""

    n: int
    sampling: SamplingParams
    max_lag: int
    whole: bool
    prompts: bytes = b""
    prompt_count: int = 0

    def check(self, key: str, asked: "Binding") -> "Binding":
        """What the key stands for from now on. Raises `KeyTaken` when that is not what is asked."""
        pairs = work_pairs(self.n, asked.n, self.sampling, asked.sampling)
        pairs += [("whole", self.whole, asked.whole), ("max_lag", self.max_lag, asked.max_lag)]
        if self.prompts and asked.prompts and (self.prompts, self.prompt_count) != (asked.prompts, asked.prompt_count):
            pairs.append(("prompts", _prompts(self), _prompts(asked)))
        refuse(key, pairs)
        return self if self.prompts or not asked.prompts else asked


def work_pairs(
    n: int,
    asked_n: int,
    sampling: SamplingParams,
    asked_sampling: SamplingParams,
    prompt: bytes = b"",
    asked: bytes = b"",
) -> list[Pair]:
    """What decides the samples of one prompt (packed tokens): each as it is bound, and as it is asked now."""
    fields = SamplingParams.__struct_fields__
    pairs: list[Pair] = [("n", n, asked_n)]
    pairs += [(name, getattr(sampling, name), getattr(asked_sampling, name)) for name in fields]
    return [*pairs, ("the prompt", _digest(prompt), _digest(asked))]


def refuse(key: str, pairs: Sequence[Pair]) -> None:
    """Raises `KeyTaken` when any of (name, what it is bound to, what is asked now) differ."""
    differing = [(name, bound, asked) for name, bound, asked in pairs if bound != asked]
    if differing:
        bound = ", ".join(f"{name}={bound}" for name, bound, _ in differing)
        asked = ", ".join(f"{name}={asked}" for name, _, asked in differing)
        raise KeyTaken(
            f"The rollouts key {key!r} is bound to {bound}; now it is asked with {asked}. A key stands for one batch "
            "of work: ask again with what it is bound to, or give other work another key (one for each step, such as "
            f"{key + '/2'!r})."
        )


def _digest(prompt: bytes) -> str:
    return f"{len(prompt) // 4} tokens with hash {blake3(prompt).hexdigest(4)}"


def _prompts(binding: Binding) -> str:
    return f"{binding.prompt_count} prompts with hash {binding.prompts[:4].hex()}"
