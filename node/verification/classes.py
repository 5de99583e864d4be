"""Arithmetic classes: engines of one class round alike, as far as their makers keep to it."""

import msgspec

__all__ = ["ArithmeticClass", "ClassPair"]


class ArithmeticClass(msgspec.Struct, frozen=True, order=True):
    """Everything that decides how an engine rounds. The noise between two classes is learned for each pair."""

    engine: str
    """As "transformers" or "vllm"."""
    engine_version: str
    device: str
    """As "cpu" or "NVIDIA H100". CPUs of different vector width may round otherwise; only measurement tells."""
    dtype: str
    """In which the model computes, as "bfloat16"."""
    attention: str
    """The attention backend, as "sdpa"."""
    parallelism: int = 1
    """Ranks of tensor parallelism: sums over ranks are rounded in another order."""

    @property
    def name(self) -> str:
        """A label for tables and logs."""
        parts = (self.engine, self.engine_version, self.device, self.dtype, self.attention, f"tp{self.parallelism}")
        return "/".join(parts)


ClassPair = tuple[ArithmeticClass, ArithmeticClass]
"""(the author's class, the checker's class): drawing rounds otherwise than scoring, so the order counts."""
