"""The newest entries of what the ledger must not forget at once, in little memory. Pure."""

from array import array

__all__ = ["Recent"]

_EMPTY = -1


class Recent:
    """The last `most` values that were set, each under a key; keys are of `key_bytes`, values of `value_bytes`.

    An entry takes its bytes and 8 to 16 more, where a dictionary of objects takes some 300: they stand one after
    another in a ring. Where a key's entry is in the ring stands in a table that is searched from the key's hash on
    (linear probing, with deletion by shifting back: Knuth, The Art of Computer Programming, volume 3, section 6.4,
    algorithm R).
    """

    def __init__(self, most: int, key_bytes: int, value_bytes: int) -> None:
        self._most, self._key_bytes, self._value_bytes = most, key_bytes, value_bytes
        self._keys, self._values = bytearray(), bytearray()
        self._next = 0
        """Where the next entry goes: in the place of the oldest one, once there are `most`."""
        self._table = array("i", [_EMPTY]) * 8
        """Positions in the ring. A power of two, at most half of it in use."""

    def __len__(self) -> int:
        return len(self._keys) // self._key_bytes

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`; None: it was not set, or is forgotten."""
        at = self._table[self._slot_of(key)]
        return None if at == _EMPTY else bytes(self._values[at * self._value_bytes : (at + 1) * self._value_bytes])

    def set(self, key: bytes, value: bytes) -> None:
        """Set the value of `key`, which stays as old as it is if it was set before. Raises `ValueError` for a key or
        value of another size."""
        if len(key) != self._key_bytes or len(value) != self._value_bytes:
            raise ValueError(f"a key of {len(key)} bytes, a value of {len(value)}")
        slot = self._slot_of(key)
        if (at := self._table[slot]) == _EMPTY:
            at = self._next
            self._next = (at + 1) % self._most
            if at < len(self):
                self._forget(self._slot_of(self._key(at)))
                slot = self._slot_of(key)  # shifting back may have moved the empty one
            self._keys[at * self._key_bytes : (at + 1) * self._key_bytes] = key
            self._table[slot] = at
        self._values[at * self._value_bytes : (at + 1) * self._value_bytes] = value
        if 2 * len(self) > len(self._table):
            self._enlarge()

    def _key(self, at: int) -> bytes:
        return bytes(self._keys[at * self._key_bytes : (at + 1) * self._key_bytes])

    def _slot_of(self, key: bytes) -> int:
        """The slot of the key's entry; where there is none, the empty one in which it would be."""
        last = len(self._table) - 1
        slot = hash(key) & last
        while (at := self._table[slot]) != _EMPTY and self._key(at) != key:
            slot = (slot + 1) & last
        return slot

    def _forget(self, slot: int) -> None:
        """Empty the slot, and move up what was put further on because it was taken."""
        last, table = len(self._table) - 1, self._table
        further = slot
        while (at := table[further := (further + 1) & last]) != _EMPTY:
            first = hash(self._key(at)) & last
            if (further - first) & last >= (further - slot) & last:
                table[slot], slot = at, further
        table[slot] = _EMPTY

    def _enlarge(self) -> None:
        self._table = array("i", [_EMPTY]) * (2 * len(self._table))
        for at in range(len(self)):
            self._table[self._slot_of(self._key(at))] = at
