"""What a catch-up has requested, and blocks whose hashes it does not know yet."""

from dataclasses import dataclass

__all__ = ["BLOCK", "Request", "Unlisted"]

BLOCK = 0
"""`Request.kind` of a block; the other kinds are those of `Blob`."""


@dataclass(slots=True)
class Request:
    """A request to one peer. `name`: of a blob, b"" for a block. `deadline`: local time."""

    peer: bytes
    kind: int
    name: bytes
    block: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A block that came with the label of a version whose block hashes we lack."""

    block: int
    peer: bytes
    deadline: float
    """Local time after which the block is requested from another peer: labels are not signed, so there may be no such
    version."""
