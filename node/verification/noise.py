"""Gumbel noise for (seed, stream, position, token), bit-equal on every platform.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). It
is a function of a counter and a key, so the noise of one token is computed without that of the others:

    BLAKE3(DOMAIN || seed u64 LE || stream u64 LE) -> a u32, b u32, c u32, d u32     (the first 16 bytes, little-endian)
    Philox(counter = (token // 4, position, c, d), key = (a, b)) -> four words; the token's word is number token % 4
    u = (word + 1/2) / 2^32                                                         in (0, 1), exact in float64
    noise = -log(-log(u))

Logarithms of C libraries differ in their last bit. `portable_log` uses only +, -, * and /, which IEEE 754 defines to
the bit, in a fixed order and one numpy operation each, so that no compiler can fuse two of them. Engines compute the
same bits in torch (`node.engines.vllm.plugin.swarm_vllm.noise`).

The noise has 2^32 values, from -3.1 to 22.9. So a token whose probability is below about 1e-10 may never be drawn.
"""

import struct
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import ArrayLike, NDArray

__all__ = ["gumbel", "philox", "portable_log", "uniforms"]

DOMAIN: Final = b"swarm-node noise 1"
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF_WORD: Final = np.uint64(32)
_LN2_HIGH: Final = float.fromhex("0x1.62e42feep-1")
"""ln 2 with 32 bits, so that its product with an exponent is exact."""
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF: Final = 0.7071067811865476
_TERMS: Final = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))
"""Of 2 atanh(s) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...); |s| <= 0.172, so the first omitted term is below 1e-19."""

Words = NDArray[np.uint64]
"""32-bit words, each in 64 bits, so that products do not overflow."""


def philox(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]) -> tuple[Words, ...]:
    """Philox-4x32-10: four words for each counter. The four parts of the counter are broadcast against each other."""
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(part, np.uint64) for part in counter))
    k0, k1 = key
    for _ in range(10):
        first, second = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (second >> _HALF_WORD) ^ x1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF_WORD) ^ x3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return x0, x1, x2, x3


def uniforms(seed: int, stream: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """The uniform number in (0, 1) of each token: (vocabulary,). `seed`, `stream`: 64 bits. `position`: 32 bits, the
    number of tokens drawn before."""
    digest = blake3(DOMAIN + struct.pack("<QQ", seed, stream)).digest(16)
    a, b, c, d = struct.unpack("<4I", digest)
    blocks = np.arange((vocabulary + 3) // 4, dtype=np.uint64)
    words = np.stack(philox((blocks, position, c, d), (a, b)), 1).reshape(-1)[:vocabulary]
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def portable_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The natural logarithm of positive normal numbers, the same bits everywhere, within 1e-15 of it (relative)."""
    fraction, exponent = np.frexp(x)
    small = fraction < _SQRT_HALF
    fraction = np.where(small, fraction * 2.0, fraction)
    power = (exponent - small).astype(np.float64)
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    total = np.full_like(square, _TERMS[0])
    for term in _TERMS[1:]:
        total = total * square
        total = total + term
    return power * _LN2_HIGH + (power * _LN2_LOW + (s + s) * total)


def gumbel(seed: int, stream: int, position: int, vocabulary: int) -> NDArray[np.float64]:
    """The noise of each token of the vocabulary at a position: float64, (vocabulary,)."""
    return -portable_log(-portable_log(uniforms(seed, stream, position, vocabulary)))
