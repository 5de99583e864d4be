"""Rates of links, as people write them."""

from typing import Final

from codec.errors import UsageError

__all__ = ["MAX_MBIT", "check_mbit"]

MAX_MBIT: Final = 1e7
"""10 Tbit/s: more than any machine's link."""


def check_mbit(flag: str, value: float) -> None:
    """Raise `UsageError`, which names the flag, unless `value` is a rate in Mbit/s."""
    if not 0 <= value <= MAX_MBIT:
        raise UsageError(f"{flag}: in Mbit/s, 0 or more")
