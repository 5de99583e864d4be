"""The errors that a trainer may have to catch. Each says what happened; none leaves anything half done."""

from codec.errors import SwarmError

__all__ = ["PromptRefused", "PublishFailed", "RolloutsFailed", "SwarmBusy", "SwarmDown", "SwarmTimeout"]


class RolloutsFailed(SwarmError):
    """The seed refused a whole batch of rollouts, for example because another process uses its key."""


class PromptRefused(RolloutsFailed):
    """A prompt was refused, and the rollouts of its group were read.

    `index`: which of the prompts, counted from 0. `reason`: a sentence.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"Prompt {index} was refused, so it has no rollouts. {reason}")
        self.index = index
        self.reason = reason

    def __reduce__(self) -> tuple[type["PromptRefused"], tuple[int, str]]:
        """For pickle, so that a process of a trainer can raise the error in another one."""
        return PromptRefused, (self.index, self.reason)


class SwarmDown(SwarmError):
    """The seed on this host, or the node that was asked, does not answer, or ended during the call."""


class SwarmBusy(SwarmError):
    """Two versions are not sealed yet, and neither was within the time that `publish` may wait."""


class SwarmTimeout(SwarmError):
    """What the call waited for did not happen before its deadline."""


class PublishFailed(SwarmError):
    """The seed refused a version. The version before it stays the head, and the next one may be published."""
