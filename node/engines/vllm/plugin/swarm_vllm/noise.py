"""Portable draws in torch: the noise of `node.verification.noise` to the bit, for a batch, on the batch's device.

The transformers engine and vLLM's worker processes draw by it. Only the few tokens that are nearly tied need the noise
to the bit: the others are ruled out by the device's own logarithm, which is off by 1e-15. Needs torch and blake3.
"""

import struct
from collections.abc import Iterable
from typing import Final

import torch
from blake3 import blake3

__all__ = ["draw", "exact_noise", "noise", "places"]

_DOMAIN: Final = b"swarm-node noise 1"
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = 0xFFFFFFFF
_LN2_HIGH: Final = float.fromhex("0x1.62e42feep-1")
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF: Final = 0.7071067811865476
_TERMS: Final = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))
_TIE: Final = 1e-9
"""Nats. Tokens this close to the best are compared with noise that is exact to the bit."""


def places(rows: Iterable[tuple[int, int, int]]) -> torch.Tensor:
    """What the noise of each row depends on, from its (seed, stream, position): int64, (rows, 5), on the CPU."""
    found = []
    for seed, stream, position in rows:
        digest = blake3(_DOMAIN + struct.pack("<QQ", seed, stream)).digest(16)
        found.append((*struct.unpack("<4I", digest), position))
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 5)


def noise(rows: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The noise of every token, to 1e-14: float64, (rows, vocabulary), on the device of `rows` (see `places`)."""
    blocks = torch.arange((vocabulary + 3) // 4, dtype=torch.int64, device=rows.device)
    words = torch.stack(_philox(blocks[None], rows), -1).reshape(len(rows), -1)[:, :vocabulary]
    return -torch.log(-torch.log(_uniform(words)))


def exact_noise(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The noise of some tokens, to the bit: float64, the shape of `tokens`, (rows, any)."""
    words = torch.stack(_philox(tokens // 4, rows), -1)
    word = words.gather(-1, (tokens % 4)[..., None])[..., 0]
    return -_portable_log(-_portable_log(_uniform(word)))


def draw(logprobs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The argmax of each row's log-probability plus noise, the smallest of tied tokens: int64, (rows,).

    `logprobs`: float32, (rows, vocabulary). `rows`: as `places` returns it, on the same device, which has float64.
    """
    values = logprobs.double() + noise(rows, logprobs.shape[-1])
    best = values.amax(-1, keepdim=True)
    token = values.argmax(-1)
    near = values >= best - _TIE
    for row in (near.sum(-1) > 1).nonzero()[:, 0].tolist():
        tied = near[row].nonzero()[:, 0]
        exact = logprobs[row, tied].double() + exact_noise(rows[row : row + 1], tied[None])[0]
        token[row] = tied[(exact == exact.max()).nonzero()[0, 0]]
    return token


def _philox(blocks: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox-4x32-10 of (block, position, c, d) under the key (a, b): four words, int64.

    `blocks`: (rows or 1, any). A product needs 64 bits without a sign; int64 has the same bits, and its right shift is
    masked.
    """
    k0, k1, x2, x3, x1 = rows.split(1, -1)
    x0 = blocks
    for _ in range(10):
        first, second = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((second >> 32) & _LOW) ^ x1 ^ k0,
            second & _LOW,
            ((first >> 32) & _LOW) ^ x3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return x0, x1, x2, x3


def _uniform(words: torch.Tensor) -> torch.Tensor:
    return (words.double() + 0.5) * 2.0**-32


def _portable_log(x: torch.Tensor) -> torch.Tensor:
    """As `node.verification.noise.portable_log`: one operation a kernel, so that none are fused."""
    fraction, exponent = torch.frexp(x)
    small = fraction < _SQRT_HALF
    fraction = torch.where(small, fraction * 2.0, fraction)
    power = (exponent - small.to(exponent.dtype)).double()
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    total = torch.full_like(square, _TERMS[0])
    for term in _TERMS[1:]:
        total = total * square
        total = total + term
    return power * _LN2_HIGH + (power * _LN2_LOW + (s + s) * total)
