"""The device on which torch computes, by the name that a user gave."""

import torch

from codec.errors import UsageError

__all__ = ["usable_device"]


def usable_device(name: str) -> torch.device:
    """The device of this name. Raises `UsageError` when torch cannot use it here."""
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            cuda = torch.version.cuda
            build = f"this torch is built for CUDA {cuda}" if cuda else "this torch is built without CUDA"
            raise UsageError(
                f"--device {name}: torch finds no GPU here ({build}). Install a torch for this machine's driver, or "
                "use --device cpu."
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise UsageError(f"--device {name}: this machine has {count} GPUs, counted from cuda:0.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("--device mps: torch finds no Apple GPU here. Use --device cpu.")
    return device
