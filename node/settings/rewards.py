"""Checks of the settings of a node about its rewards."""

import re
from typing import Final, Protocol

from codec.errors import UsageError
from node.settings.addresses import duration_s

__all__ = ["MAX_GIVEN", "check_rewards"]

MAX_GIVEN: Final = 24
"""Rewards that one node can be given. Its abilities fit into one message, with those that are built in."""
GIVEN: Final = re.compile(r"[A-Za-z0-9._-]{1,32}=\S.*:[A-Za-z_]\w*")


class _NodeRewards(Protocol):
    """The settings of a node about its rewards."""

    @property
    def reward(self) -> tuple[str, ...]: ...
    @property
    def reward_within(self) -> str: ...
    @property
    def reward_memory_mb(self) -> int: ...
    @property
    def engine(self) -> str: ...


def check_rewards(config: _NodeRewards) -> None:
    """Raise `UsageError` for a reward that is not written as NAME=MODULE:FUNCTION, and for limits out of range."""
    for text in config.reward:
        if not GIVEN.fullmatch(text):
            raise UsageError(
                f"--reward {text}: write NAME=MODULE:FUNCTION, or NAME=FILE.py:FUNCTION. A name has 1 to 32 of the "
                "characters A-Z a-z 0-9 . _ -"
            )
    names = [text.partition("=")[0] for text in config.reward]
    if len(set(names)) < len(names) or len(names) > MAX_GIVEN:
        raise UsageError(f"--reward: each name once, and at most {MAX_GIVEN}")
    if config.reward and config.engine == "none":
        raise UsageError("--reward: without an engine there are no samples; leave out --engine none")
    if not 0.1 <= duration_s(config.reward_within) <= 3600.0:
        raise UsageError("--reward-within: 0.1s to 1h")
    if not 256 <= config.reward_memory_mb <= 1_000_000:
        raise UsageError("--reward-memory-mb: 256 to 1000000")
