"""Entropy bounds on the size of a delta, in bits per change."""

import numpy as np

from codec.bits import Bits, DType, ordinal

__all__ = ["Bounds"]


class Bounds:
    """Entropies of the steps seen, in bits per change.

    The models are fitted to the data itself, so a real coder also pays for its tables. Positions cost -log2 of the
    binomial likelihood plus 0.5 log2 n for the rate of each context. Values cost the plug-in entropy of the ordinal
    difference.
    """

    def __init__(self) -> None:
        self._elements = self._changed = 0
        self._by_exponent_bits = 0.0
        self._differences: dict[int, dict[int, int]] = {}

    def add(self, old: Bits, new: Bits, dtype: DType) -> None:
        """Count one part of a tensor. Each pair of part and exponent is a context."""
        shift, mask = dtype.exponent_shift or 0, dtype.exponent_mask or 0
        where = np.flatnonzero(old != new)
        members = np.bincount((old >> dtype.bits.type(shift)) & dtype.bits.type(mask), minlength=mask + 1)
        exponents = ((old[where] >> dtype.bits.type(shift)) & dtype.bits.type(mask)).astype(np.int64)
        changes = np.bincount(exponents, minlength=mask + 1)
        self._elements += old.size
        self._changed += where.size
        self._by_exponent_bits += sum(
            _binomial_bits(int(n), int(k)) for n, k in zip(members, changes, strict=True) if n
        )
        signed = (ordinal(new[where], dtype) - ordinal(old[where], dtype)).view(f"i{dtype.itemsize}")
        pairs, counts = np.unique(np.stack([exponents, signed.astype(np.int64)]), axis=1, return_counts=True)
        for (exponent, difference), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
            table = self._differences.setdefault(exponent, {})
            table[difference] = table.get(difference, 0) + count

    def naive(self) -> float:
        """Return the bound when positions and differences depend on nothing."""
        together: dict[int, int] = {}
        for table in self._differences.values():
            for difference, count in table.items():
                together[difference] = together.get(difference, 0) + count
        bits = _binomial_bits(self._elements, self._changed) + _entropy_bits(together)
        return bits / max(self._changed, 1)

    def conditional(self) -> float:
        """Return the bound when both depend on the old exponent, and positions on the tensor too."""
        bits = self._by_exponent_bits + sum(map(_entropy_bits, self._differences.values()))
        return bits / max(self._changed, 1)


def _binomial_bits(n: int, k: int) -> float:
    bits = 0.5 * np.log2(n)
    for count in (k, n - k):
        if count:
            bits -= count * np.log2(count / n)
    return float(bits)


def _entropy_bits(table: dict[int, int]) -> float:
    counts = np.array(list(table.values()), np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum()) if counts.size else 0.0
