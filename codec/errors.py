"""The two kinds of expected errors.

`PeerError`: bytes from outside the process broke a rule. Drop the bytes and the peer that sent them.
`UsageError`: the user can fix the cause. Its text is shown unchanged, so write it for the user.
Any other exception is a bug of this program and must crash it.
"""

__all__ = ["PeerError", "SwarmError", "UsageError"]


class SwarmError(Exception):
    """Root of every error that this project raises on purpose."""


class PeerError(SwarmError):
    """Bytes from a peer, or from a damaged disk, broke a rule; the text names the field."""


class UsageError(SwarmError):
    """Something that the user can fix: one or two sentences that say what happened and what to do next."""
