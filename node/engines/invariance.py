"""Whether a row's bits depend on the batch beside it: measured with the model's own weights, on this machine.

An engine that promises replays needs it. Kernels are chosen by the shape of their operands, so no table of devices can
tell. Costs about 300 tokens.
"""

from typing import Final

import torch
from transformers import PreTrainedModel

from node.engines.base import SamplingParams
from node.engines.rows import ROW_MULTIPLE, UNREADABLE, Rows, vocabulary_of

__all__ = ["rows_alike"]

TEXT: Final = 5
"""Tokens that are read at once."""
STEPS: Final = 2
"""Tokens that are read one by one after them."""
BATCHES: Final = ((ROW_MULTIPLE, 0), (ROW_MULTIPLE, ROW_MULTIPLE - 1), (5, 4), (10, 9), (24, 17))
"""(rows, the place of the row that is compared) of batches in which all rows differ."""
LARGEST_BATCH: Final = (128, 77)
"""The same for devices that are fast enough: `node.engines.transformers.BATCH_ROWS`."""
_PLAIN: Final = SamplingParams(max_tokens=1)


@torch.inference_mode()
def rows_alike(model: PreTrainedModel, *, cached: bool) -> bool:
    """Whether one row's logits have the same bits in batches of several sizes, beside other rows, and beside copies."""
    batches = BATCHES if model.device.type == "cpu" else (*BATCHES, LARGEST_BATCH)
    try:
        wanted = _logits(model, _texts(model, 1, 0), 0, cached)
        return bool(torch.isfinite(wanted).all()) and all(
            torch.equal(_logits(model, _texts(model, rows, place), place, cached), wanted) for rows, place in batches
        )
    except UNREADABLE:
        return False


def _logits(model: PreTrainedModel, ids: torch.Tensor, row: int, cached: bool) -> torch.Tensor:
    rows = Rows(model, ids[:, :TEXT].tolist(), cached=cached)
    found = [rows.read(_PLAIN, TEXT)[row]]
    for at in range(TEXT, TEXT + STEPS):
        rows.add(ids[:, at].to(model.device))
        found.append(rows.read(_PLAIN, TEXT)[row])
    return torch.stack(found)


def _texts(model: PreTrainedModel, rows: int, place: int) -> torch.Tensor:
    """Texts that all differ, of which the one at `place` is always the same: int64, (rows, TEXT + STEPS)."""
    length = TEXT + STEPS
    numbers = torch.arange(rows * length).reshape(rows, length) * 7919 + 104729
    numbers[place] = torch.arange(length) * 31 + 3
    return numbers.remainder(vocabulary_of(model))
