"""The three ways in which something can go wrong.

`PeerError`: bytes from elsewhere broke a rule; drop them, and whoever sent them.
`UsageError`: the person at the keyboard can fix it; its text is shown as it is, so write it for them.
Anything else is our own bug and must crash.
"""

__all__ = ["PeerError", "SwarmError", "UsageError"]


class SwarmError(Exception):
    """Root of every error that this project raises on purpose."""


class PeerError(SwarmError):
    """Bytes from a peer (or from a disk that may lie) broke a rule; the text names the field."""


class UsageError(SwarmError):
    """Something that the user can fix: one or two sentences that say what happened and what to do next."""
