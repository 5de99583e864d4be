"""What a trainer may have to catch. Each says what happened; none of them leaves anything half done."""

from codec.errors import SwarmError

__all__ = ["PromptRefused", "PublishFailed", "RolloutsFailed", "SwarmBusy", "SwarmDown", "SwarmTimeout"]


class RolloutsFailed(SwarmError):
    """The seed refused the prompts or the sampling, or no node's engine can do what was asked for."""


class PromptRefused(RolloutsFailed):
    """A prompt was refused, and its rollouts are asked for. `index`: which of the prompts; `reason`: a sentence."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"Prompt {index} was refused, so it has no rollouts. {reason}")
        self.index = index
        self.reason = reason


class SwarmDown(SwarmError):
    """The seed on this host does not answer, or ended in the middle."""


class SwarmBusy(SwarmError):
    """Two versions are not sealed yet, and waiting for one of them took too long."""


class SwarmTimeout(SwarmError):
    """What was waited for did not happen before the deadline."""


class PublishFailed(SwarmError):
    """The seed refused a version; the one before stands, and the next may be published."""
