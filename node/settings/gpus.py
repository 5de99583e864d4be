"""Whether this machine has a GPU that torch can use, by the files of its kernel: torch is imported in engines only."""

from pathlib import Path
from typing import Final

__all__ = ["gpu_files"]

_FILES: Final = ("proc/driver/nvidia", "dev/nvidia0", "dev/kfd", "dev/dxg")
"""One of these is there when torch can use a GPU (NVIDIA, AMD, WSL)."""


def gpu_files(root: Path = Path("/")) -> bool:
    """Whether the kernel shows a GPU. `root`: where /proc and /dev are."""
    return any((root / path).exists() for path in _FILES)
