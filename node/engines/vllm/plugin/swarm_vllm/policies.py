"""What becomes of running requests at a commit."""

from typing import Literal

__all__ = ["Policy"]

Policy = Literal["continue", "recompute", "drain"]
"""What becomes of running requests when the weights change.

continue: they go on with the keys and values that they have. recompute: their keys and values are computed again from
the first token. drain: the change waits until they are done, and new requests wait for the change.
"""
