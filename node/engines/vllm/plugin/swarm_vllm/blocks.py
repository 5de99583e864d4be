"""Row by row computations whose bits do not depend on the rows beside a row.

Matrix kernels for few rows add in another order than those for many, and with AMX they also cut wide sums by the number
of rows. So rows are padded to a multiple of a few, and with AMX are computed in blocks of one size. vLLM and SGLang
compute their linear layers so on CPUs. Needs torch alone.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch.nn.functional import pad

__all__ = ["AMX_ROWS", "ROWS_MULTIPLE", "in_blocks"]

ROWS_MULTIPLE: Final = 4
"""Rows of a linear layer's input are padded to a multiple of this. bfloat16 rounds otherwise for 1 row, float32 for 1
to 3, and with two threads for 5 to 7 and 9 to 11."""
AMX_ROWS: Final = 32
"""Rows that a linear layer computes at a time on a CPU with AMX. Fewer cost more when texts are read (blocks of 4: ten
times as long as all rows at once; of 32: two to three times), more cost more when tokens are drawn."""


def in_blocks(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, at_once: int | None) -> torch.Tensor:
    """As `compute(x)`, which maps (..., inputs) to (..., outputs). `at_once`: rows of a block; None: all in one."""
    rows = x.reshape(-1, x.shape[-1])
    if missing := -len(rows) % (at_once or ROWS_MULTIPLE):
        rows = pad(rows, (0, 0, 0, missing))
    elif len(rows) <= (at_once or len(rows)):
        return compute(x)
    parts = [compute(block) for block in rows.split(at_once or len(rows))]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found[: x.shape[:-1].numel()].reshape(*x.shape[:-1], -1)
