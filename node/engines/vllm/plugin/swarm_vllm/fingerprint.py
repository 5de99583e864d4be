"""How this process rounds: a short hash of the bits that fixed inputs give in the kernels that models spend time in.

The transformers engine and vLLM's worker processes name their arithmetic class by it. Needs torch and blake3.
"""

import re
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from blake3 import blake3

__all__ = ["device_name", "fingerprint"]

_DIGEST_BYTES: Final = 4
_HIDDEN: Final = 576
"""The widths and heads of SmolLM2-135M: large enough that kernels cut their sums into blocks."""
_SHAPES: Final = ((_HIDDEN, 1536), (1536, _HIDDEN), (_HIDDEN, 6144))
"""(inputs, outputs) of the matrices."""
_ROWS: Final = (4, 64)
"""Rows of a matrix product: a small batch that draws a token, and one that reads a text."""
_HEADS: Final = (9, 64)
"""(number, width) of the attention's heads."""
_READS: Final = ((1, 40), (40, 40))
"""(queries, keys) of the attention: drawing a token, and reading a text."""


def device_name(device: torch.device) -> str:
    """What of the device decides how it rounds: letters, digits and hyphens, as "cpu-avx512" or "NVIDIA-H100-80GB"."""
    if device.type == "cpu":
        name = f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    elif device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = device.type
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


@torch.inference_mode()
def fingerprint(device: torch.device, dtype: torch.dtype) -> str:
    """Eight hexadecimal digits, equal on machines whose kernels give equal bits here.

    They depend on the release of torch too: two releases may differ in kernels that are not tried. Takes less than a
    tenth of a second on one core.
    """
    digest = blake3(torch.__version__.partition("+")[0].encode())
    for found in _results(device, dtype):
        digest.update(found.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest(_DIGEST_BYTES).hex()


def _results(device: torch.device, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for number, (inputs, outputs) in enumerate(_SHAPES):
        weight = _made_up((outputs, inputs), number).to(device, dtype)
        for rows in _ROWS:
            yield F.linear(_made_up((rows, inputs), 10 + number).to(device, dtype), weight)
    heads, width = _HEADS
    for number, (queries, keys) in enumerate(_READS):
        q, k, v = (
            _made_up((4, heads, length, width), 20 + 3 * number + i).to(device, dtype)
            for i, length in enumerate((queries, keys, keys))
        )
        yield F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1)
    hidden = _made_up((4, _HIDDEN), 30).to(device, dtype)
    yield hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    yield F.silu(hidden)
    wide = 8.0 * _made_up((4, 6144), 31).to(device)
    yield torch.softmax(wide, -1)
    yield torch.log_softmax(wide, -1)
    angles = 40.0 * wide[:, :512]
    yield from (angles.cos(), angles.sin())


def _made_up(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Values from -1 to 1 that look random: float32, on the CPU. Made of integers, so every machine has the same."""
    count = 1
    for length in shape:
        count *= length
    x = torch.arange(number << 24, (number << 24) + count, dtype=torch.int32)
    for multiplier in (0x2C1B3C6D, 0x297A2D39):  # products wrap; the shifts spread the high bits
        x = (x ^ ((x >> 15) & 0x1FFFF)) * multiplier
    return ((x ^ ((x >> 15) & 0x1FFFF)) >> 8).float().div_(1 << 23).reshape(shape)
