"""Rollouts that are larger than one message, because they have routes: sent in parts, and put together at the seed.

A node sends all parts again until the verdict comes. So a part may be lost, repeated or late, like any message. The
signature is over the whole, and is verified when all parts are there.
"""

from collections import OrderedDict
from collections.abc import Container
from typing import Final

from codec.errors import PeerError
from node.ledger.messages import MAX_BODY_BYTES, MAX_PARTS, PART_BYTES, RolloutPart, SignedRollout, encode

__all__ = ["PartialRollouts", "bodies_of"]

MOST_BYTES: Final = 256 << 20
"""Memory of all rollouts that are not complete."""
MOST_BYTES_A_NODE: Final = 64 << 20
"""The same of one node. Beyond either, the node's oldest is dropped, and comes again."""

Key = tuple[bytes, int, int]
"""(node, lease, sample)"""


def bodies_of(lease: int, sample: int, sealed: bytes) -> tuple[bytes, ...]:
    """The bodies of the messages that carry a sealed rollout. Raises `ValueError` when `MAX_PARTS` are too few."""
    if len(sealed) <= MAX_BODY_BYTES - 64:
        return (encode(SignedRollout(sealed)),)
    parts = -(-len(sealed) // PART_BYTES)
    if parts > MAX_PARTS:
        raise ValueError(f"a rollout of {len(sealed)} bytes is more than {MAX_PARTS} messages may have")
    return tuple(
        encode(RolloutPart(lease, sample, part, parts, sealed[part * PART_BYTES : (part + 1) * PART_BYTES]))
        for part in range(parts)
    )


class PartialRollouts:
    """The rollouts of which some parts have come."""

    def __init__(self) -> None:
        self._held: OrderedDict[Key, dict[int, bytes]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}
        """By node."""

    @property
    def nbytes(self) -> int:
        """The memory of all parts."""
        return sum(self._bytes.values())

    def add(self, node: bytes, message: RolloutPart) -> bytes | None:
        """The whole sealed rollout, if this was its last part; then it is forgotten here.

        The caller must have checked that `node` owes this sample. Raises `PeerError` for a part that cannot be.
        """
        last = message.part == message.parts - 1
        if message.part >= message.parts or not (last or len(message.data) == PART_BYTES):
            raise PeerError(f"rollout part {message.part} of {message.parts}: {len(message.data)} bytes")
        key = node, message.lease, message.sample
        parts = self._held.setdefault(key, {})
        self._bytes[node] = self._bytes.get(node, 0) + len(message.data) - len(parts.get(message.part, b""))
        parts[message.part] = message.data
        if len(parts) == message.parts and max(parts) == message.parts - 1:
            self._drop(key)
            return b"".join(parts[i] for i in range(message.parts))
        while self._bytes[node] > MOST_BYTES_A_NODE or self.nbytes > MOST_BYTES:
            oldest = next(held for held in self._held if held[0] == node)
            self._drop(oldest)
            if oldest == key:
                break
        return None

    def keep_live(self, leases: Container[int]) -> None:
        """Forget the rollouts of all leases but these."""
        for key in [key for key in self._held if key[1] not in leases]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        parts = self._held.pop(key)
        self._bytes[key[0]] -= sum(map(len, parts.values()))
        if not self._bytes[key[0]]:
            del self._bytes[key[0]]
