"""Bindings: a session's key stands for one batch of work for ever, so that a trainer that asks again continues it.

Under the same key, other prompts or other sampling would receive the old samples. So the ledger keeps the first use of
a key durably, and refuses other work under it with an error that names both.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from blake3 import blake3

from codec.errors import UsageError
from node.engines.base import SamplingParams

__all__ = ["KEPT", "Binding", "KeyTaken", "refuse_if_different", "work_pairs"]

KEPT: Final = 1 << 14
"""The newest bindings that are kept: with one key per step, this many steps."""

Pair = tuple[str, object, object]
"""A name, the value that the key is bound to, the value that is asked for now."""


class KeyTaken(UsageError):
    """The key stands for other work."""


class Binding(NamedTuple):
    """The work that a key stands for."""

    n: int
    """Samples a group."""
    sampling: SamplingParams
    max_lag: int = 1
    """Tokens are at most this many versions old."""
    whole: bool = False
    """One node generates each group in one batch."""
    prompts: bytes = b""
    """A hash of all prompts; empty where they were not known in advance (an iterator)."""
    prompt_count: int = 0

    def check(self, key: str, asked: "Binding") -> "Binding":
        """The work that the key stands for from now on. Raises `KeyTaken` when `asked` is other work."""
        pairs = work_pairs(self.n, asked.n, self.sampling, asked.sampling)
        pairs += [("whole", self.whole, asked.whole), ("max_lag", self.max_lag, asked.max_lag)]
        if self.prompts and asked.prompts and (self.prompts, self.prompt_count) != (asked.prompts, asked.prompt_count):
            pairs.append(("prompts", _describe_prompts(self), _describe_prompts(asked)))
        refuse_if_different(key, pairs)
        return self if self.prompts or not asked.prompts else asked


def work_pairs(
    n: int,
    asked_n: int,
    sampling: SamplingParams,
    asked_sampling: SamplingParams,
    prompt: bytes = b"",
    asked: bytes = b"",
) -> list[Pair]:
    """Everything that decides the samples of one prompt (packed tokens), as it is bound and as it is asked for now."""
    fields = SamplingParams.__struct_fields__
    pairs: list[Pair] = [("n", n, asked_n), ("adapter", sampling.extra.adapter, asked_sampling.extra.adapter)]
    plain, asked_plain = (each.with_options(adapter="") for each in (sampling, asked_sampling))
    pairs += [(name, getattr(plain, name), getattr(asked_plain, name)) for name in fields]
    return [*pairs, ("the prompt", _describe_prompt(prompt), _describe_prompt(asked))]


def refuse_if_different(key: str, pairs: Sequence[Pair]) -> None:
    """Raises `KeyTaken` when the two values of any pair differ."""
    differing = [(name, bound, asked) for name, bound, asked in pairs if bound != asked]
    if differing:
        bound = ", ".join(f"{name}={bound}" for name, bound, _ in differing)
        asked = ", ".join(f"{name}={asked}" for name, _, asked in differing)
        raise KeyTaken(
            f"The rollouts key {key!r} is bound to {bound}; now it is asked with {asked}. A key stands for one batch "
            "of work: ask again with what it is bound to, or give other work another key (one for each step, such as "
            f"{key + '/2'!r})."
        )


def _describe_prompt(prompt: bytes) -> str:
    return f"{len(prompt) // 4} tokens with hash {blake3(prompt).hexdigest(4)}"


def _describe_prompts(binding: Binding) -> str:
    return f"{binding.prompt_count} prompts with hash {binding.prompts[:4].hex()}"
