"""The dtypes of checkpoints as torch's."""

from typing import Final

import torch

__all__ = ["TORCH_DTYPES"]

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64, "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
"""By the name in safetensors' header."""
